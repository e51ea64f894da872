// Worker: one complete worker of the service: control client, shard server, metrics port. The
// caller supplies the device and the ring transport.
//
// Tests: worker_test.cc, worker_membership_test.cc, packed_upload_test.cc
#ifndef RINGATTN_WORKER_SERVICE_WORKER_H_
#define RINGATTN_WORKER_SERVICE_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/kernel_rate.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/listener.h"
#include "common/wire/health_listener.h"
#include "worker/comm/communicator.h"
#include "worker/comm/reach/reach_listener.h"
#include "worker/device/device.h"
#include "worker/direct/client_port.h"
#include "worker/direct/direct_streams.h"
#include "worker/kv/step_streams.h"
#include "worker/location/worker_location.h"
#include "worker/region/local_memory.h"
#include "worker/service/control_client.h"
#include "worker/service/shard_service.h"
#include "worker/service/worker_core.h"
#include "worker/service/worker_metrics.h"

namespace ringattn::worker {

struct WorkerOptions {
  std::string name;
  std::string coordinator;  // host:port of the control listener
  std::string secret;
  TransportSecurity security;  // for the control channel and the data listener
  std::string data_listen = "127.0.0.1:0";
  std::string metrics_listen = "127.0.0.1:0";  // empty: no metrics port
  std::string health_listen;                   // empty: no health port
  int64_t memory_limit_bytes = 0;
  int threads = 1;
  LocationOptions location;
  std::optional<uint64_t> device_slot;  // of the device; unset: unknown
  // Measured by the caller.
  std::vector<KernelRate> kernel_rates;
  double call_overhead_seconds = 0;
  // Name or address of this machine on the ring's network, for probes. Empty: none.
  std::string ring_host;
  RingMemberOptions ring;
  std::function<void(Metrics*)> export_transport;  // adds the transport's metrics; may be empty
  // Host memory: path of the Unix socket, users whose processes may connect, and copy threads per
  // direction. Empty path: disabled.
  std::string local_socket_path;
  std::vector<uid_t> local_uids;
  int copy_threads = 2;
  int64_t max_pinned_bytes = 0;  // pinned client regions, for the device's own copies
  int64_t max_imported_bytes =
      0;  // client CUDA memory; 0: disabled, as on a device that cannot import
  // Direct streams: listen address, the address that clients use (empty: as bound), and security.
  // Empty: disabled.
  std::string client_data_listen;
  std::string client_data_address;
  TransportSecurity client_security;
  // K/V caches: their memory together, and how long they outlive the loss of the coordinator.
  int64_t max_kv_cache_bytes = -1;  // -1: half of memory_limit_bytes
  absl::Duration kv_orphan_time = absl::Seconds(60);
  // How long ended operations are kept for equal requests. Zero: not at all.
  absl::Duration prepared_lease = kPreparedLease;
  // How long a step ring's thread waits actively for the next request before it sleeps.
  absl::Duration kv_spin = absl::ZeroDuration();
};

// Thread safe.
class Worker {
 public:
  // Listens and starts connecting to the coordinator. `device` and `transport` must outlive the
  // worker.
  //   on_leave  the coordinator asks the process to exit; must not block
  //   on_stuck  a teardown exceeded its limit; should end the process
  //
  // Returns UNAVAILABLE if a port cannot be bound.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(
      WorkerOptions options, Device* device, RingTransport* transport,
      std::function<void(const std::string&)> on_leave,
      std::function<void(const std::string&)> on_stuck);

  // Stops. Closing the metrics port takes up to two seconds more.
  ~Worker();

  // Asks the coordinator to release this worker: it admits no more requests that need the worker
  // and waits for those in progress. Returns when that is done, when `timeout` passes, or when the
  // coordinator is lost. Blocks. Call Stop() afterwards.
  void Leave(absl::Duration timeout);

  // Leaves the ring, frees everything and closes the data port, within the teardown limit.
  // Idempotent.
  void Stop();

  const std::string& data_address() const { return data_address_; }
  // As bound; empty if disabled.
  std::string client_data_address() const {
    return client_port_ == nullptr ? "" : client_port_->address();
  }
  const std::string& metrics_address() const { return metrics_address_; }
  const std::string& health_address() const { return health_address_; }
  const WorkerMetrics& metrics() const { return metrics_; }

 private:
  Worker(WorkerOptions options, std::unique_ptr<LocalMemory> local_memory, Device* device,
         RingTransport* transport, std::function<void(const std::string&)> on_stuck);

  std::unique_ptr<DirectStreams> MakeDirectStreams();
  WorkerCoreOptions CoreOptions();
  StepHooks MakeStepHooks(bool direct);
  StepRingOptions MakeRingOptions();
  absl::Status Listen(const std::string& device_description);
  absl::Status ListenForClients();
  // Publishes whether this worker is a member of a ring.
  void SetReady(bool ready);
  void Join(const Device& device, std::function<void(const std::string&)> on_leave);

  const WorkerOptions options_;
  WorkerMetrics metrics_;
  std::unique_ptr<LocalMemory> local_memory_;      // null if disabled
  std::unique_ptr<DirectStreams> direct_streams_;  // null if disabled
  WorkerCore core_;
  ShardServiceImpl shard_service_;
  KvShardServiceImpl kv_relay_service_;           // for the coordinator, on the data address
  KvShardServiceImpl kv_direct_service_;          // for clients, on the client data address
  std::unique_ptr<ClientPort> client_port_;       // null if disabled
  std::unique_ptr<wire::HealthListener> health_;  // null if disabled
  std::unique_ptr<wire::Listener> listener_;      // of the data address
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<ReachListener> reach_listener_;  // null if disabled
  std::string data_address_;
  std::string metrics_address_;
  std::string health_address_;
  std::unique_ptr<ControlClient> control_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WORKER_H_
