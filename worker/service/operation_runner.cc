#include "worker/service/operation_runner.h"

#include <algorithm>
#include <utility>

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

}  // namespace

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

OperationRunner::OperationRunner(Device* device, DoneCallback on_done)
    : device_(device), on_done_(std::move(on_done)), thread_([this] { Loop(); }) {}

OperationRunner::~OperationRunner() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    queue_.clear();
  }
  thread_.join();
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
  queue_.push_back(std::move(operation));
}

void OperationRunner::DropQueued() {
  std::deque<std::shared_ptr<ShardOperation>> dropped;
  absl::MutexLock lock(&mutex_);
  dropped.swap(queue_);
}

bool OperationRunner::WaitUntilIdle(absl::Time deadline) const {
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return queue_.empty() && current_ == nullptr;
  };
  absl::MutexLock lock(&mutex_);
  return AwaitUntil(mutex_, absl::Condition(&idle), deadline);
}

bool OperationRunner::Current(RunningOperation* running) const {
  std::shared_ptr<ShardOperation> current;
  {
    absl::MutexLock lock(&mutex_);
    current = current_;
  }
  if (current == nullptr) return false;
  Operation& operation = current->operation();
  const RunControl& control = operation.control();
  *running = {current->info(), step_.load(std::memory_order_relaxed),
              control.progress.load(std::memory_order_relaxed),
              FractionDone(operation.spec(), operation.program(),
                           control.work.load(std::memory_order_relaxed),
                           control.calls_done.load(std::memory_order_relaxed))};
  return true;
}

void OperationRunner::Loop() {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || !queue_.empty();
  };
  while (true) {
    std::shared_ptr<ShardOperation> operation;
    std::shared_ptr<Communicator> communicator;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (closing_) return;
      operation = std::move(queue_.front());
      queue_.pop_front();
      current_ = operation;
      communicator = communicator_;
      step_ = 0;
    }
    RunOne(operation, communicator);
    // Released before the runner can be seen idle; teardown relies on it.
    communicator.reset();
    absl::MutexLock lock(&mutex_);
    current_ = nullptr;
  }
}

void OperationRunner::RunOne(const std::shared_ptr<ShardOperation>& operation,
                             const std::shared_ptr<Communicator>& communicator) {
  if (!operation->ended().ok()) return;
  const ExecuteOptions options{.with_timeline = operation->info().with_timeline,
                               .uploads = operation->PendingUploads()};
  absl::StatusOr<ExecutionReport> report =
      absl::UnavailableError("the ring of this operation's generation has ended");
  if (communicator != nullptr) {
    report = Execute(operation->operation(), *device_, communicator.get(), options, &step_);
  }
  if (!operation->ended().ok()) return;
  if (report.ok()) operation->SetFinished();
  RunningOperation last{operation->info(), step_.load(),
                        operation->operation().control().progress.load(), /*fraction_done=*/1};
  on_done_(*operation, report, last);
}

}  // namespace ringattn::worker
