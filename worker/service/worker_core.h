// WorkerCore: executes the coordinator's messages. It translates them into calls of the ring
// member, the registry and the runner, and their results into replies. The control client
// transports the messages.
#ifndef RINGATTN_WORKER_SERVICE_WORKER_CORE_H_
#define RINGATTN_WORKER_SERVICE_WORKER_CORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "common/plan/kernel_rate.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/device/host_queue.h"
#include "worker/direct/direct_streams.h"
#include "worker/kv/kv_store.h"
#include "worker/operation/kept_operations.h"
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
  // Rates of the device, which the coordinator predicts with (Reserved.slowdown).
  std::vector<KernelRate> kernel_rates;
  RingMemberOptions ring;
  // Called on the core's thread when this worker joins or leaves a ring. Must not block.
  std::function<void(bool member)> on_membership = [](bool) {};
  // Null if host memory is disabled. Must outlive the core.
  LocalMemory* local_memory = nullptr;
  // Null if direct streams are disabled. Must outlive the core.
  DirectStreams* direct_streams = nullptr;
  int64_t max_kv_cache_bytes = 0;
  absl::Duration kv_orphan_time = absl::Seconds(60);
  // How long an ended operation is kept for equal requests. Zero: not at all.
  absl::Duration prepared_lease = kPreparedLease;
};

// Thread safe. Handles control messages in the order of OnMessage; those that may block run on the
// core's own thread.
class WorkerCore {
 public:
  // `send` passes a message to the coordinator and must not block. `on_stuck` is called when a
  // teardown exceeds its limit, and should end the process.
  WorkerCore(WorkerCoreOptions options, Device* device, RingTransport* transport,
             WorkerMetrics* metrics, std::function<void(v1::JoinRequest)> send,
             std::function<void(const std::string&)> on_stuck);
  ~WorkerCore();

  // Handles every message except `registered` and `leave`. Blocks for a short inline run at most
  // (OperationRunner::RunOrEnqueue). Must not be called concurrently.
  void OnMessage(v1::JoinResponse message);

  // The coordinator is lost. Frees everything but K/V caches before it returns.
  void OnDisconnected(const std::string& reason);

  // Returns quickly; waits for no work.
  v1::Heartbeat MakeHeartbeat();

  OperationRegistry& registry() { return registry_; }
  // K/V caches, which belong to no ring and outlive the loss of a coordinator.
  KvStore& kv_store() { return kv_store_; }
  // Called by ShardService when all inputs of an operation have arrived.
  void OnUploaded(const OperationInfo& info);
  // Called when all inputs of an operation have arrived and Uploaded has been sent. Starts its run
  // if it does not wait for a message.
  void OnInputsComplete(const OperationInfo& info);

 private:
  void Enqueue(std::function<void()> work);
  void LeaveRing(const std::string& reason, const std::function<void(bool member)>& on_membership);
  void OnPrepare(const v1::Prepare& prepare);
  void OnCommit(const v1::Commit& commit);
  // Reports that the ring cannot be formed, and the ranks that this worker cannot reach.
  void ReportUnformed(const v1::Commit& commit, const absl::Status& status);
  void OnProbe(const v1::Probe& probe);
  void OnTeardown(const v1::Teardown& teardown);
  void OnLosePeer(const v1::LosePeer& lose);
  void OnReserve(std::shared_ptr<v1::Reserve> reserve, absl::Time received);
  void OnReserveDone(const v1::Reserve& reserve,
                     const absl::StatusOr<std::shared_ptr<ShardOperation>>& operation,
                     int64_t workspace_bytes);
  void OnPrepareOnlyDone(const v1::Reserve& reserve,
                         const absl::StatusOr<Reservations::Preparation>& made,
                         int64_t workspace_bytes);
  // Returns what all answers to Reserve have in common, and logs a rejection.
  v1::Reserved AnswerTo(const v1::Reserve& reserve, const absl::Status& status,
                        int64_t workspace_bytes) const;
  // Writes the inputs of an inline operation and starts it.
  void RunInline(const v1::Reserve& reserve, const std::shared_ptr<ShardOperation>& operation,
                 v1::Reserved reserved);
  // The same for tensors in the client's memory. Returns false if their copies need staging memory;
  // nothing has been done then.
  bool RunInlineInMemory(const v1::Reserve& reserve,
                         const std::shared_ptr<ShardOperation>& operation,
                         const v1::Reserved& reserved);
  void StartInline(const v1::InlineRun& run, const std::shared_ptr<ShardOperation>& operation,
                   bool is_short);
  // Returns whether the thread of OnMessage() may wait for the copies and the run.
  bool IsShortOnDevice(const Operation& operation, Direction direction, int64_t copied_bytes) const;
  // Releases an inline operation. Sends the message once its memory is free.
  void AnswerInline(const OperationInfo& info, v1::JoinRequest answer)
      ABSL_LOCKS_EXCLUDED(inline_mutex_);
  void ForgetInline() ABSL_LOCKS_EXCLUDED(inline_mutex_);
  void OnRelease(const v1::Release& release);
  // Accepts direct streams for the operation. Called before the coordinator publishes the token.
  void ExpectStreams(const v1::Reserve& reserve, const std::shared_ptr<ShardOperation>& operation);
  void StartRun(const v1::Run& run);
  void StartRun(const std::string& id, uint64_t generation, const RunStart& start);
  // Starts copies from and to client regions; such operations have no streams.
  void BeginCopies(const v1::Reserve& reserve, const std::shared_ptr<ShardOperation>& operation);
  void SendTransferFailed(const v1::Reserve& reserve, const std::string& why);
  void OnReleased(const OperationInfo& info) ABSL_LOCKS_EXCLUDED(inline_mutex_);
  void OnRunDone(ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
                 const RunningOperation& last);
  struct InlineOperation {
    v1::Reserved reserved;                   // for Finished
    absl::Time received;                     // the Reserve
    absl::Duration copy_in;                  // as far as the CPU copied the inputs
    std::shared_ptr<RegionTransfer> copies;  // null: the tensors are in messages
  };
  void AnswerRun(ShardOperation& operation, const InlineOperation& run, v1::JoinRequest message);
  void TakeOutputs(const ShardOperation& operation, v1::Finished* finished);
  void CopyOutputs(const ShardOperation& operation, RegionTransfer& copies, v1::Finished* finished);
  // Returns nothing for other operations.
  std::optional<InlineOperation> FindInline(const std::string& id)
      ABSL_LOCKS_EXCLUDED(inline_mutex_);
  void LogRun(const ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result) const;
  void SendGenerationFailed(uint64_t generation, const absl::Status& status,
                            const RunningOperation* last,
                            const std::vector<uint32_t>& unreached = {});

  const WorkerCoreOptions options_;
  const std::function<void(v1::JoinRequest)> send_;
  WorkerMetrics* const metrics_;
  MemoryBudget budget_;
  ActivityProbe probe_;
  ObservedDevice device_;
  KeptOperations kept_;
  KvStore kv_store_;
  Watchdog watchdog_;
  ResidualStore residuals_;
  OperationRegistry registry_;
  OperationRunner runner_;
  RingMember ring_;  // used on work_ only, except for CancelForming
  std::atomic<uint64_t> heartbeat_sequence_{0};
  uint64_t last_prepare_ = 0;        // generation; used on OnMessage's thread only
  std::atomic<int> queued_runs_{0};  // in work_: inline runs, and the runs that follow them
  Reservations reservations_;        // used on work_ only
  absl::Time received_;              // the Reserve that reservations_ handles; used on work_ only
  absl::Mutex inline_mutex_;
  // Inline operations of this generation, by id: until the answer is made, and then the answer.
  std::map<std::string, InlineOperation> inline_runs_ ABSL_GUARDED_BY(inline_mutex_);
  std::map<std::string, v1::JoinRequest> inline_answers_ ABSL_GUARDED_BY(inline_mutex_);
  std::atomic<bool> ending_{false};
  HostQueue probing_;   // of peers, which takes seconds
  HostQueue work_;      // the control thread, or OnMessage() in its place; uses the members above
  HostQueue decoding_;  // last: its thread passes work to work_
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WORKER_CORE_H_
