#include "client/cli/region_stage.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {

void AddTransportFlags(FlagSet& command, std::string* transport, int64_t* staging_bytes) {
  command
      .Add("--transport", transport,
           "Transport of tensors. relay: through the coordinator; direct: streams straight to the "
           "workers (their --client_data_listen); host_memory: memory shared with workers of this "
           "machine (--local_memory of ringattn-worker); cuda_memory: memory on a GPU of this "
           "machine, shared with GPU workers; auto: host memory if staging memory is ready (never "
           "in the first call), else direct, else relay. Without the requested transport the call "
           "fails")
      .OneOf({"auto", "relay", "direct", "host_memory", "cuda_memory"})
      .ShowDefault();
  command
      .Add("--staging_limit", staging_bytes,
           "Limit of staging memory for host_memory, e.g. 512MiB or 4GiB; at most half of the free "
           "memory is used. 0: no staging")
      .AsSize()
      .ShowDefault();
}

void AddCudaFlags(FlagSet& command, CudaFlags* flags) {
  command
      .Add("--cuda_device", &flags->device, "With --transport=cuda_memory: the GPU for the tensors")
      .InRange(0, 1023)
      .ShowDefault();
  command
      .Add("--cuda_memory", &flags->memory,
           "With --transport=cuda_memory: vmm (cuMemCreate), or malloc (cudaMalloc), which workers "
           "cannot map from every container")
      .OneOf({"vmm", "malloc"})
      .ShowDefault();
}

void AddChannelsFlag(FlagSet& command, int* channels) {
  command
      .Add("--channels_per_worker", channels,
           "Connections to each worker for direct streams; 0: chosen by the number of workers and "
           "cores")
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
