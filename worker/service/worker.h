// Worker: one worker of the service, whole: control client, shard server, metrics
// port. Device and ring transport come from outside.
#ifndef RINGATTN_WORKER_SERVICE_WORKER_H_
#define RINGATTN_WORKER_SERVICE_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/kernel_rate.h"
#include "common/security/credentials.h"
#include "common/wire/health_listener.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/direct/client_port.h"
#include "worker/direct/direct_streams.h"
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
  TransportSecurity security;  // of the control channel and the data listener
  std::string data_listen = "127.0.0.1:0";
  std::string metrics_listen = "127.0.0.1:0";  // empty: no metrics port
  std::string health_listen;                   // empty: no port for probes
  int64_t memory_limit_bytes = 0;
  int threads = 1;
  // Measured by the caller.
  std::vector<KernelRate> kernel_rates;
  double call_overhead_seconds = 0;
  RingMemberOptions ring;
  // Clients' memory: where the socket is to be, for the processes of which users, and with how
  // many threads each way. Empty: none is taken.
  std::string local_socket_path;
  std::vector<uid_t> local_uids;
  int copy_threads = 2;
  int64_t max_pinned_bytes = 0;  // of regions, for the device's own copies
  int64_t max_imported_bytes =
      0;  // of CUDA memory; 0, or a device that imports none: none is taken
  // Where clients stream tensors straight to this worker: where it listens, where they reach that
  // (as bound unless given), and how it is protected. Empty: they do not.
  std::string client_data_listen;
  std::string client_data_address;
  TransportSecurity client_security;
};

// Thread safe.
class Worker {
 public:
  // Listens and begins to dial. `device` and `transport` outlive the worker.
  //   on_leave: the coordinator asks the process to end; must not block
  //   on_stuck: a teardown exceeded its bound; expected to end the process
  // UNAVAILABLE if a port cannot be bound.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(
      WorkerOptions options, Device* device, RingTransport* transport,
      std::function<void(const std::string&)> on_leave,
      std::function<void(const std::string&)> on_stuck);

  // Stops. Closing the metrics port takes its server up to two seconds more.
  ~Worker();

  // Asks the coordinator to let this worker go: it admits no request that needs it and waits for
  // those that it has a part in. Returns when it has, `timeout` is over or the coordinator is
  // gone. Blocks; Stop() comes after it.
  void Leave(absl::Duration timeout);

  // Leaves the ring, frees everything, closes the data port. Bounded by the teardown's
  // bound. Idempotent.
  void Stop();

  const std::string& data_address() const { return data_address_; }
  // As bound; empty without.
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
  absl::Status Listen(const std::string& device_description);
  absl::Status ListenForClients();
  // Whether this worker is a member of a ring.
  void SetReady(bool ready);
  void Join(const Device& device, std::function<void(const std::string&)> on_leave);

  const WorkerOptions options_;
  WorkerMetrics metrics_;
  std::unique_ptr<LocalMemory> local_memory_;      // null without
  std::unique_ptr<DirectStreams> direct_streams_;  // null without
  WorkerCore core_;
  ShardServiceImpl shard_service_;
  std::unique_ptr<ClientPort> client_port_;       // null without
  std::unique_ptr<wire::HealthListener> health_;  // null without
  std::unique_ptr<grpc::Server> server_;
  std::string data_address_;
  std::string metrics_address_;
  std::string health_address_;
  std::unique_ptr<ControlClient> control_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WORKER_H_
