// WorkerCore: what a worker does on the coordinator's word. It turns messages into
// calls of the ring member, the registry and the runner, and their ends into answers;
// how messages travel is the control client's concern.
#ifndef RINGATTN_WORKER_SERVICE_WORKER_CORE_H_
#define RINGATTN_WORKER_SERVICE_WORKER_CORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/kernel_rate.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/device/host_queue.h"
#include "worker/direct/direct_streams.h"
#include "worker/operation/memory_budget.h"
#include "worker/operation/operation_registry.h"
#include "worker/operation/residual.h"
#include "worker/region/local_memory.h"
#include "worker/service/activity_probe.h"
#include "worker/service/operation_runner.h"
#include "worker/service/reservations.h"
#include "worker/service/ring_member.h"
#include "worker/service/watchdog.h"
#include "worker/service/worker_metrics.h"

namespace ringattn::worker {

struct WorkerCoreOptions {
  std::string name;
  int64_t memory_limit_bytes = 0;
  // Of the device: what its coordinator predicts with (Reserved.slowdown).
  std::vector<KernelRate> kernel_rates;
  RingMemberOptions ring;
  // This worker has become a member of a ring, or is none any more. Called by the core's
  // thread; must not block.
  std::function<void(bool member)> on_membership = [](bool) {};
  // Null: this worker takes no memory of clients. Outlives the core.
  LocalMemory* local_memory = nullptr;
  // Null: clients do not reach this worker. Outlives the core.
  DirectStreams* direct_streams = nullptr;
};

// Thread safe. Control messages are handled in the order of OnMessage; those that may
// block do so on a thread of the core's.
class WorkerCore {
 public:
  // `send` hands a message to the coordinator and never blocks. `on_stuck` is called
  // when a teardown exceeds its bound; it is expected to end the process.
  WorkerCore(WorkerCoreOptions options, Device* device, RingTransport* transport,
             WorkerMetrics* metrics, std::function<void(v1::JoinRequest)> send,
             std::function<void(const std::string&)> on_stuck);
  ~WorkerCore();

  // Handles every message but `registered` and `leave`. Never blocks. Called by one
  // thread at a time.
  void OnMessage(const v1::JoinResponse& message);

  // The coordinator is gone: frees everything before it returns.
  void OnDisconnected(const std::string& reason);

  // Quick: waits for no work.
  v1::Heartbeat MakeHeartbeat();

  OperationRegistry& registry() { return registry_; }
  // For ShardService: all inputs of an operation have arrived.
  void OnUploaded(const OperationInfo& info);

 private:
  void Enqueue(std::function<void()> work);
  void LeaveRing(const std::string& reason, const std::function<void(bool member)>& on_membership);
  void OnPrepare(const v1::Prepare& prepare);
  void OnCommit(const v1::Commit& commit);
  void OnTeardown(const v1::Teardown& teardown);
  void OnReserve(std::shared_ptr<const v1::Reserve> reserve);
  void OnReserveDone(const v1::Reserve& reserve,
                     const absl::StatusOr<std::shared_ptr<ShardOperation>>& operation,
                     int64_t workspace_bytes);
  void OnRelease(const v1::Release& release);
  // Its client streams to this worker: from now on it may. Before anybody learns of the token.
  void ExpectStreams(const v1::Reserve& reserve, const std::shared_ptr<ShardOperation>& operation);
  // Its tensors lie in regions: nobody opens a stream for them.
  void BeginCopies(const v1::Reserve& reserve, const std::shared_ptr<ShardOperation>& operation);
  void SendTransferFailed(const v1::Reserve& reserve, const std::string& why);
  void OnReleased(const OperationInfo& info);
  void OnRunDone(ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
                 const RunningOperation& last);
  void LogRun(const ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result) const;
  void SendGenerationFailed(uint64_t generation, const absl::Status& status,
                            const RunningOperation* last);

  const WorkerCoreOptions options_;
  const std::function<void(v1::JoinRequest)> send_;
  WorkerMetrics* const metrics_;
  MemoryBudget budget_;
  ActivityProbe probe_;
  ObservedDevice device_;
  Watchdog watchdog_;
  ResidualStore residuals_;
  OperationRegistry registry_;
  OperationRunner runner_;
  RingMember ring_;  // used on work_ only, but for CancelForming
  std::atomic<uint64_t> heartbeat_sequence_{0};
  uint64_t last_prepare_ = 0;  // generation; used by OnMessage's thread only
  Reservations reservations_;  // used on work_ only
  HostQueue work_;             // the control thread, which uses the rest
  HostQueue decoding_;         // last: its thread hands work to work_
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WORKER_CORE_H_
