// OperationRunner: runs operations one after another on its own thread, in the order of the
// coordinator's Run messages.
#ifndef RINGATTN_WORKER_SERVICE_OPERATION_RUNNER_H_
#define RINGATTN_WORKER_SERVICE_OPERATION_RUNNER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/executor/executor.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// The running operation, for heartbeats.
struct RunningOperation {
  OperationInfo info;
  int64_t step = 0;
  int64_t progress = 0;
  double fraction_done = 0;  // fraction of the program's work, in [0, 1]
};

// Returns the fraction of the program's work that is done if calls report `work` and the first
// `calls_done` of them have ended (RunControl).
double FractionDone(const AttentionSpec& spec, const Program& program, int64_t work,
                    int64_t calls_done);

// Thread safe.
class OperationRunner {
 public:
  // Called on the runner's thread after each program, unless the operation was ended meanwhile.
  // `last` is the program's last progress.
  using DoneCallback =
      std::function<void(ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
                         const RunningOperation& last)>;

  // `device` must outlive the runner.
  OperationRunner(Device* device, DoneCallback on_done);
  // Waits for the running operation; end it first.
  ~OperationRunner();

  OperationRunner(const OperationRunner&) = delete;
  OperationRunner& operator=(const OperationRunner&) = delete;

  // Sets the communicator of operations that start from now on. Null between generations.
  void SetCommunicator(std::shared_ptr<Communicator> communicator);

  // Wakes the ring's links, because an operation will run soon. Never blocks.
  void Announce() const;

  // Enqueues an operation. Never blocks.
  void Run(std::shared_ptr<ShardOperation> operation);

  // Removes queued operations that are not running.
  void DropQueued();

  // Waits until nothing is running or queued. Returns false at `deadline`.
  bool WaitUntilIdle(absl::Time deadline) const;

  // Returns false if nothing is running.
  bool Current(RunningOperation* running) const;

 private:
  void Loop();
  void RunOne(const std::shared_ptr<ShardOperation>& operation,
              const std::shared_ptr<Communicator>& communicator);

  Device* const device_;
  const DoneCallback on_done_;
  std::atomic<int64_t> step_{0};

  mutable absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Communicator> communicator_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<ShardOperation>> queue_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ShardOperation> current_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_OPERATION_RUNNER_H_
