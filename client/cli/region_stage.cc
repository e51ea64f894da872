#include "client/cli/region_stage.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {

void AddTransportFlags(FlagSet& command, std::string* transport, int64_t* staging_bytes) {
  command
      .Add("--transport", transport,
           "How tensors travel. host: workers of this machine copy them out of and into "
           "memory that they are shown (--local_memory of ringattn-worker), or the call "
           "fails; direct: straight to the workers (their --client_data_listen), or the "
           "call fails; cuda: copied into memory of a GPU of this machine, which workers' "
           "GPUs copy out of and into, or the call fails; "
           "relay: through the coordinator; auto: host where memory stands "
           "ready, which a command's first call finds none of, else direct, else relay")
      .OneOf({"auto", "relay", "direct", "host_memory", "cuda_memory"})
      .ShowDefault();
  command
      .Add("--staging_limit", staging_bytes,
           "Bytes of such memory, 512MiB or 4GiB; no more than half of what is free is "
           "taken. 0: only tensors that lie in it already go by host memory")
      .AsSize()
      .ShowDefault();
}

void AddCudaFlags(FlagSet& command, CudaFlags* flags) {
  command
      .Add("--cuda_device", &flags->device,
           "With --transport=cuda_memory: the GPU whose memory tensors lie in")
      .InRange(0, 1023)
      .ShowDefault();
  command
      .Add("--cuda_memory", &flags->memory,
           "With --transport=cuda_memory: vmm, of cuMemCreate, or malloc, of cudaMalloc, which "
           "workers cannot map from every container")
      .OneOf({"vmm", "malloc"})
      .ShowDefault();
}

void AddChannelsFlag(FlagSet& command, int* channels) {
  command
      .Add("--channels_per_worker", channels,
           "Connections to each worker that tensors go straight to; 0: by the number of "
           "workers and of cores")
      .InRange(0, 16)
      .ShowDefault();
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
