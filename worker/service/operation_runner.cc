#include "worker/service/operation_runner.h"

#include <algorithm>
#include <utility>

#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "common/schedule/schedule.h"
#include "worker/kernels/work.h"

namespace ringattn::worker {
namespace {

// Returns the number of query heads of a call.
int64_t HeadsOf(const AttentionShape& shape, const ComputeCall& call) {
  if (call.part != ComputeCall::kWhole) return call.part_query_heads;
  return call.heads.all() ? shape.num_heads : call.heads.count * shape.group_size();
}

int64_t WorkOf(const AttentionShape& shape, const ComputeCall& call) {
  const int64_t pairs = call.pairs * shape.batch * HeadsOf(shape, call);
  switch (call.op) {
    case ComputeCall::Op::kForward:
      return pairs * ForwardPairWork(shape.head_dim, shape.head_dim_v);
    case ComputeCall::Op::kBackward:
      return pairs * BackwardPairWork(shape.head_dim, shape.head_dim_v);
    case ComputeCall::Op::kBiasGradient:
      return pairs * BiasGradientPairWork(shape.head_dim, shape.head_dim_v);
    default:
      return 0;  // negligible compared with the others
  }
}

// Multiplications of a short program. One core of a CPU takes 1 to 3 ms for them.
constexpr int64_t kShortWork = 16 << 20;

}  // namespace

bool IsShort(const AttentionSpec& spec, const Program& program) {
  int64_t work = 0;
  for (const Step& step : program.steps) {
    if (!step.transfers.empty()) return false;
    for (const ComputeCall& call : step.calls) {
      work += WorkOf(spec.shape, call);
      if (work > kShortWork) return false;
    }
  }
  return true;
}

double FractionDone(const AttentionSpec& spec, const Program& program, int64_t work,
                    int64_t calls_done) {
  double all = 0, ended = 0;
  int64_t calls = 0;
  for (const Step& step : program.steps) {
    for (const ComputeCall& call : step.calls) {
      const double cost = static_cast<double>(WorkOf(spec.shape, call));
      all += cost;
      if (calls++ < calls_done) ended += cost;
    }
  }
  if (all == 0) return calls_done >= calls ? 1.0 : 0.0;
  return std::min(1.0, std::max(static_cast<double>(work), ended) / all);
}

OperationRunner::OperationRunner(Device* device, DoneCallback on_done,
                                 PreemptedCallback on_preempted)
    : device_(device),
      on_done_(std::move(on_done)),
      on_preempted_(std::move(on_preempted)),
      thread_([this] { Loop(); }),
      preempting_thread_([this] { PreemptLoop(); }) {}

OperationRunner::~OperationRunner() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    ordinary_.queue.clear();
    preempting_.queue.clear();
  }
  thread_.join();
  preempting_thread_.join();
}

void OperationRunner::SetCommunicator(std::shared_ptr<Communicator> communicator) {
  absl::MutexLock lock(&mutex_);
  communicator_.swap(communicator);
}

void OperationRunner::Announce() const {
  // Under the lock, so that no other reference to the communicator exists when its ring is torn
  // down.
  absl::MutexLock lock(&mutex_);
  if (communicator_ != nullptr) communicator_->WakeLinks();
}

void OperationRunner::Run(std::shared_ptr<ShardOperation> operation) {
  absl::MutexLock lock(&mutex_);
  ordinary_.queue.push_back(std::move(operation));
}

void OperationRunner::RunOrEnqueue(std::shared_ptr<ShardOperation> operation) {
  std::shared_ptr<Communicator> communicator;
  {
    absl::MutexLock lock(&mutex_);
    if (closing_ || !ordinary_.idle() || !preempting_.idle()) {
      ordinary_.queue.push_back(std::move(operation));
      return;
    }
    ordinary_.current = operation;
    ordinary_.step = 0;
    communicator = communicator_;
  }
  operation->operation().control().runs_on_caller = true;
  RunCurrent(ordinary_, operation, std::move(communicator));
}

void OperationRunner::Preempt(std::shared_ptr<ShardOperation> operation,
                              absl::Duration preempt_after) {
  operation->operation().control().preempts = true;
  absl::MutexLock lock(&mutex_);
  preempting_.queue.push_back(std::move(operation));
  preempt_after_ = preempt_after;
}

void OperationRunner::DropQueued() {
  std::deque<std::shared_ptr<ShardOperation>> ordinary, preempting;
  absl::MutexLock lock(&mutex_);
  ordinary.swap(ordinary_.queue);
  preempting.swap(preempting_.queue);
}

bool OperationRunner::WaitUntilIdle(absl::Time deadline) const {
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return ordinary_.idle() && preempting_.idle();
  };
  absl::MutexLock lock(&mutex_);
  return AwaitUntil(mutex_, absl::Condition(&idle), deadline);
}

bool OperationRunner::Current(const Lane& lane, RunningOperation* running) const {
  std::shared_ptr<ShardOperation> current;
  {
    absl::MutexLock lock(&mutex_);
    current = lane.current;
  }
  if (current == nullptr) return false;
  Operation& operation = current->operation();
  const RunControl& control = operation.control();
  *running = {current->info(), lane.step.load(std::memory_order_relaxed),
              control.progress.load(std::memory_order_relaxed),
              FractionDone(operation.spec(), operation.program(),
                           control.work.load(std::memory_order_relaxed),
                           control.calls_done.load(std::memory_order_relaxed))};
  return true;
}

void OperationRunner::Loop() {
  // A caller of RunOrEnqueue() may run the current operation.
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || (!ordinary_.queue.empty() && ordinary_.current == nullptr);
  };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (closing_) return;
    }
    RunNext(ordinary_);
  }
}

void OperationRunner::PreemptLoop() {
  absl::Time earliest = absl::InfinitePast();
  while (const std::optional<absl::Duration> preempt_after = AwaitPreemption(earliest)) {
    const absl::Time begin = MonotonicNow();
    device_->Preempt(true);
    const bool paused = RunPreempting(begin + *preempt_after);
    device_->Preempt(false);
    if (!paused) continue;
    const absl::Time end = MonotonicNow();
    const absl::Duration pause =
        device_->pauses() ? std::min(end - begin, kLongestPause) : absl::ZeroDuration();
    earliest = end + std::max(*preempt_after, pause);
    on_preempted_(pause);
  }
}

std::optional<absl::Duration> OperationRunner::AwaitPreemption(absl::Time earliest) {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || !preempting_.queue.empty();
  };
  // Nothing to preempt, or nothing that preempts any more.
  const auto at_once = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || ordinary_.idle() || preempting_.queue.empty();
  };
  absl::MutexLock lock(&mutex_);
  do {
    mutex_.Await(absl::Condition(&has_news));
    AwaitUntil(mutex_, absl::Condition(&at_once), earliest);
    if (closing_) return std::nullopt;
  } while (preempting_.queue.empty());
  return preempt_after_;
}

bool OperationRunner::RunPreempting(absl::Time end) {
  bool paused = false;
  do {
    paused |= OrdinaryRuns();
    if (!RunNext(preempting_)) break;
    paused |= OrdinaryRuns();
  } while (MonotonicNow() < end);
  return paused;
}

bool OperationRunner::OrdinaryRuns() const {
  absl::MutexLock lock(&mutex_);
  return ordinary_.current != nullptr;
}

bool OperationRunner::RunNext(Lane& lane) {
  std::shared_ptr<ShardOperation> operation;
  std::shared_ptr<Communicator> communicator;
  {
    absl::MutexLock lock(&mutex_);
    if (lane.queue.empty()) return false;
    operation = std::move(lane.queue.front());
    lane.queue.pop_front();
    lane.current = operation;
    lane.step = 0;
    communicator = communicator_;
  }
  RunCurrent(lane, operation, std::move(communicator));
  return true;
}

void OperationRunner::RunCurrent(Lane& lane, const std::shared_ptr<ShardOperation>& operation,
                                 std::shared_ptr<Communicator> communicator) {
  RunOne(operation, communicator, &lane.step);
  // Released before the runner can be seen idle; teardown relies on it.
  communicator.reset();
  absl::MutexLock lock(&mutex_);
  lane.current = nullptr;
}

void OperationRunner::RunOne(const std::shared_ptr<ShardOperation>& operation,
                             const std::shared_ptr<Communicator>& communicator,
                             std::atomic<int64_t>* step) {
  if (!operation->ended().ok()) return;
  const ExecuteOptions options{.with_timeline = operation->info().with_timeline,
                               .uploads = operation->PendingUploads()};
  absl::StatusOr<ExecutionReport> report =
      absl::UnavailableError("the ring of this operation's generation has ended");
  if (communicator != nullptr) {
    report = Execute(operation->operation(), *device_, communicator.get(), options, step);
  }
  if (!operation->ended().ok()) return;
  if (report.ok()) operation->SetFinished();
  RunningOperation last{operation->info(), step->load(),
                        operation->operation().control().progress.load(), /*fraction_done=*/1};
  on_done_(*operation, report, last);
}

}  // namespace ringattn::worker
