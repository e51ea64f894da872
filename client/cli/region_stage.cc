#include "client/cli/region_stage.h"

#include "CLI/App.hpp"

namespace ringattn::client::cli {

void AddTransportFlags(CLI::App* command, std::string* transport, int64_t* staging_bytes) {
  command
      ->add_option("--transport", *transport,
                   "How tensors travel. host: workers of this machine copy them out of and into "
                   "memory that they are shown (--local_memory of ringattn-worker), or the call "
                   "fails; direct: straight to the workers (their --client_data_listen), or the "
                   "call fails; cuda: copied into memory of a GPU of this machine, which workers' "
                   "GPUs copy out of and into, or the call fails; "
                   "relay: through the coordinator; auto: host where memory stands "
                   "ready, which a command's first call finds none of, else direct, else relay")
      ->check(CLI::IsMember({"auto", "relay", "direct", "host_memory", "cuda_memory"}))
      ->capture_default_str();
  command
      ->add_option("--staging_limit", *staging_bytes,
                   "Bytes of such memory, 512MiB or 4GiB; no more than half of what is free is "
                   "taken. 0: only tensors that lie in it already go by host memory")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str();
}

void AddCudaFlags(CLI::App* command, CudaFlags* flags) {
  command
      ->add_option("--cuda_device", flags->device,
                   "With --transport=cuda_memory: the GPU whose memory tensors lie in")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str();
  command
      ->add_option(
          "--cuda_memory", flags->memory,
          "With --transport=cuda_memory: vmm, of cuMemCreate, or malloc, of cudaMalloc, which "
          "workers cannot map from every container")
      ->check(CLI::IsMember({"vmm", "malloc"}))
      ->capture_default_str();
}

void AddChannelsFlag(CLI::App* command, int* channels) {
  command
      ->add_option("--channels_per_worker", *channels,
                   "Connections to each worker that tensors go straight to; 0: by the number of "
                   "workers and of cores")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
}

void SetTransport(const std::string& transport, CallOptions* options) {
  if (transport == "auto") return;
  options->transport = transport == "host_memory"   ? TransportPreference::kHostMemory
                       : transport == "direct"      ? TransportPreference::kDirect
                       : transport == "cuda_memory" ? TransportPreference::kCudaMemory
                                                    : TransportPreference::kRelay;
  options->transport_required = transport != "relay";
}

}  // namespace ringattn::client::cli
