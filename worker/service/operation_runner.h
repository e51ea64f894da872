// OperationRunner: runs operations one after another, in the order of the coordinator's Run
// messages, on its own thread, and short ones also on their caller's. Small operations without
// peers may preempt them: they run on a second thread, while the device pauses the others
// (Device::Preempt). The others keep their order and the order of their exchanges, so preemption
// cannot make ranks wait for one another in a cycle.
//
// Between two preemptions the others compute for at least as long as they paused, so they keep at
// least half of the device.
//
// Tests: operation_runner_test.cc, preemption_test.cc
#ifndef RINGATTN_WORKER_SERVICE_OPERATION_RUNNER_H_
#define RINGATTN_WORKER_SERVICE_OPERATION_RUNNER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
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

// Returns whether the program takes a few milliseconds at most and waits for no peer. Waking
// another thread for it takes a considerable part of its time.
bool IsShort(const AttentionSpec& spec, const Program& program);

// Thread safe.
class OperationRunner {
 public:
  // Called on a thread of the runner after each program, unless the operation was ended meanwhile.
  // `last` is the program's last progress.
  using DoneCallback =
      std::function<void(ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
                         const RunningOperation& last)>;

  // Called on a thread of the runner after each preemption of a running operation.
  using PreemptedCallback = std::function<void(absl::Duration paused)>;

  // `device` must outlive the runner.
  OperationRunner(
      Device* device, DoneCallback on_done, PreemptedCallback on_preempted = [](absl::Duration) {});
  // Waits for the running operations; end them first.
  ~OperationRunner();

  OperationRunner(const OperationRunner&) = delete;
  OperationRunner& operator=(const OperationRunner&) = delete;

  // Sets the communicator of operations that start from now on. Null between generations.
  void SetCommunicator(std::shared_ptr<Communicator> communicator);

  // Wakes the ring's links, because an operation will run soon. Never blocks.
  void Announce() const;

  // Enqueues an operation. Never blocks.
  void Run(std::shared_ptr<ShardOperation> operation);

  // Runs an operation that IsShort() on this thread, if the runner is idle. Otherwise enqueues it.
  void RunOrEnqueue(std::shared_ptr<ShardOperation> operation);

  // Enqueues an operation without peers that preempts those of Run(). It waits until those have
  // computed for `preempt_after`, or for as long as they last paused if that is longer. Never
  // blocks.
  void Preempt(std::shared_ptr<ShardOperation> operation, absl::Duration preempt_after);

  // Removes queued operations that are not running.
  void DropQueued();

  // Waits until nothing is running or queued. Returns false at `deadline`.
  bool WaitUntilIdle(absl::Time deadline) const;

  // Returns false if no operation of Run() is running.
  bool Current(RunningOperation* running) const { return Current(ordinary_, running); }
  // Returns false if no operation of Preempt() is running.
  bool CurrentPreempting(RunningOperation* running) const { return Current(preempting_, running); }

 private:
  // Operations that run one after another.
  struct Lane {
    // Guarded by mutex_:
    std::deque<std::shared_ptr<ShardOperation>> queue;
    std::shared_ptr<ShardOperation> current;
    bool idle() const { return queue.empty() && current == nullptr; }

    std::atomic<int64_t> step{0};  // of the current operation
  };

  bool Current(const Lane& lane, RunningOperation* running) const ABSL_LOCKS_EXCLUDED(mutex_);
  void Loop();
  void PreemptLoop();
  // Waits until an operation may preempt. Returns its `preempt_after`, or nothing at the runner's
  // end.
  std::optional<absl::Duration> AwaitPreemption(absl::Time earliest) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs one queued operation, and further ones until `end`. Returns whether an ordinary operation
  // was running meanwhile.
  bool RunPreempting(absl::Time end) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the next operation of the lane. Returns false if there is none.
  bool RunNext(Lane& lane) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the lane's current operation, which this thread has set, and clears it.
  void RunCurrent(Lane& lane, const std::shared_ptr<ShardOperation>& operation,
                  std::shared_ptr<Communicator> communicator) ABSL_LOCKS_EXCLUDED(mutex_);
  bool OrdinaryRuns() const ABSL_LOCKS_EXCLUDED(mutex_);
  void RunOne(const std::shared_ptr<ShardOperation>& operation,
              const std::shared_ptr<Communicator>& communicator, std::atomic<int64_t>* step);

  Device* const device_;
  const DoneCallback on_done_;
  const PreemptedCallback on_preempted_;

  mutable absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Communicator> communicator_ ABSL_GUARDED_BY(mutex_);
  Lane ordinary_;
  Lane preempting_;
  absl::Duration preempt_after_ ABSL_GUARDED_BY(mutex_);  // of the newest Preempt()
  // Last: they start when the rest is there.
  std::thread thread_;
  std::thread preempting_thread_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_OPERATION_RUNNER_H_
