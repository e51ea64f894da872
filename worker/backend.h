// Backend: a device, the ring transport that serves its memory, and what both can do. The
// only place that knows which implementations of the two there are (with cuda_backend.cc, its
// part for GPUs): main.cc hands over what the command line says and gets interfaces back.
#ifndef RINGATTN_WORKER_BACKEND_H_
#define RINGATTN_WORKER_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/kernel_rate.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct BackendOptions {
  // CUDA, what moves K/V and gradients between GPUs:
  //   peer  copy engines, out of memory that the processes of one machine map
  //   nccl  NCCL, between machines too
  //   auto  peer for rings whose GPUs are all on this machine and reach one another, nccl
  //         for others; the same as nccl where there is one local worker
  std::string ring_transport = "auto";
  // CUDA, how peer shares memory: vmm (descriptors of cuMemCreate), ipc (CUDA's legacy handles) or
  // auto, the first that can be had.
  std::string peer_memory = "auto";
  // CUDA, the folder where the machine's workers meet for vmm, if they are in several network
  // namespaces: with it auto takes peer for one local worker too. Empty: none.
  std::string peer_socket_dir;
  std::string device = "auto";  // auto, cpu or cuda:N
  int threads = 1;              // CPU
  int local_workers = 1;
  int local_rank = 0;              // of local_workers; what auto takes
  int64_t memory_limit_bytes = 0;  // what requests may take; 0: the backend's default
  // The ring's, whatever moves its bytes.
  std::string ring_host = "127.0.0.1";  // of this machine, where the peers can reach it
  absl::Duration ring_step_timeout = absl::Minutes(10);
  absl::Duration ring_connect_timeout = absl::Seconds(30);
  int64_t pinned_pool_bytes = 0;       // CUDA
  int nccl_max_ctas = 0;               // CUDA; 0: the transport's default
  std::string nccl_library;            // CUDA; empty: where NcclLibrary::Load looks
  std::string kernel_family = "auto";  // CUDA; a family's name: it alone, for debugging
  // The device is beyond repair; the process should end so that it can be replaced.
  std::function<void(const std::string& what)> on_broken;
};

struct Backend {
  std::unique_ptr<Device> device;
  std::unique_ptr<RingTransport> transport;
  bool host_memory = true;         // the device's memory is the host's
  int64_t memory_limit_bytes = 0;  // what requests may take
  // Measured.
  std::vector<KernelRate> kernel_rates;
  double call_overhead_seconds = 0;
};

// Of this machine, or what a container's limits leave of it.
int64_t MachineMemoryBytes();

// INVALID_ARGUMENT if the name makes no sense, or names a device that this program was
// built without or this machine does not have; what the device says if it cannot be used.
absl::StatusOr<Backend> MakeBackend(const BackendOptions& options);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_BACKEND_H_
