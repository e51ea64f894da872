// Backend: a device, the ring transport for its memory, and their measured rates. Only this file's
// .cc and cuda_backend.cc know the implementations of both. main.cc passes command-line options in
// and gets interfaces back.
#ifndef RINGATTN_WORKER_BACKEND_H_
#define RINGATTN_WORKER_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/observability/metrics.h"
#include "common/plan/kernel_rate.h"
#include "common/security/credentials.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct BackendOptions {
  // The transport for exchanges. CPU:
  //   wire  sockets of this project; auto is the same
  //   gloo  Gloo's sockets, without encryption and token
  // CUDA:
  //   peer       copy engines and mapped memory, within one machine
  //   nccl       NCCL, also between machines
  //   wire       sockets of this project, also between machines
  //   peer+nccl  peer between GPUs that are on one machine and reach each other, else nccl, also
  //              within one ring; nccl if there is only one local worker
  //   peer+wire  the same with wire
  //   auto       the same with nccl or wire (ChooseNetwork)
  std::string ring_transport = "auto";
  // CUDA: how peer shares memory: vmm (descriptors of cuMemCreate), ipc (CUDA's legacy handles) or
  // auto (the first that is available).
  std::string peer_memory = "auto";
  // CUDA: the folder of the sockets for vmm, if the machine's workers are in different network
  // namespaces. If it is set, auto uses peer with one local worker too. Empty: none.
  std::string peer_socket_dir;
  // CUDA, for tests: workers on one GPU use peer, too (PeerTransportOptions).
  bool shared_gpu = false;
  // CUDA: workers with different ids do not use peer (PeerTransportOptions). Empty: the machine
  // decides.
  std::string host_id;
  std::string device = "auto";  // auto, cpu or cuda:N
  int threads = 1;              // CPU
  int local_workers = 1;
  int local_rank = 0;              // index among local_workers; used by auto and --ring_interface
  int64_t memory_limit_bytes = 0;  // memory for requests; 0: the backend's default
  int wire_connections = 0;        // wire: TCP connections per peer; 0: the default
  TransportSecurity cluster_security;  // wire: protects the ring's connections
  bool insecure_ring = false;          // CUDA: permits nccl between hosts despite certificates
  // wire: a name or address of this machine that peers can reach (--ring_address). Rings listen
  // there. peer needs no address, and NCCL chooses its own.
  std::string ring_host = "127.0.0.1";
  // Common to all ring transports.
  absl::Duration ring_step_timeout = absl::Minutes(10);
  absl::Duration ring_connect_timeout = absl::Seconds(30);
  int64_t pinned_pool_bytes = 0;       // CUDA
  int nccl_max_ctas = 0;               // CUDA; 0: the transport's default
  std::string nccl_library;            // CUDA; empty: see NcclLibrary::Load
  std::string kernel_family = "auto";  // CUDA; a family's name restricts calls to it, for debugging
  // The device is unusable; the process should exit so that it is restarted.
  std::function<void(const std::string& what)> on_broken;
};

struct Backend {
  std::unique_ptr<Device> device;
  std::unique_ptr<RingTransport> transport;
  bool host_memory = true;         // the device computes in host memory
  int64_t memory_limit_bytes = 0;  // memory for requests
  // Position of the device in the machine: its NUMA node, then its PCI address. Unset: unknown.
  std::optional<uint64_t> device_slot;
  // Adds the transport's metrics; may be empty.
  std::function<void(Metrics*)> export_transport;
  // Measured.
  std::vector<KernelRate> kernel_rates;
  double call_overhead_seconds = 0;
};

// Returns the machine's memory, or the container's limit if that is lower.
int64_t MachineMemoryBytes();

// Creates the device and its transport. Returns INVALID_ARGUMENT if the device name is invalid, or
// if the program or the machine does not support that device; otherwise the device's own error.
absl::StatusOr<Backend> MakeBackend(const BackendOptions& options);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_BACKEND_H_
