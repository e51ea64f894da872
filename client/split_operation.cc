#include "client/split_operation.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/api/error.h"
#include "client/merged_report.h"

namespace ringattn::client {
namespace {

// Kept alive by the requests in flight, whose `done` it is.
class SplitCall final : public Operation::State, public std::enable_shared_from_this<SplitCall> {
 public:
  explicit SplitCall(SplitParams params)
      : request_id_(std::move(params.request_id)),
        done_(std::move(params.done)),
        reports_(params.requests.size()),
        running_(params.requests.size()) {}

  const std::string& request_id() const override { return request_id_; }

  void Start(std::vector<SplitRequest> requests) ABSL_LOCKS_EXCLUDED(mutex_) {
    for (size_t i = 0; i < requests.size(); ++i) {
      if (IsStopped()) {
        OnEnd(i, absl::CancelledError("cancelled before it was sent"), nullptr);
        continue;
      }
      OperationParams& params = requests[i].params;
      params.done = [self = shared_from_this(), i, collect = std::move(requests[i].collect)](
                        const CallResult& result) { self->OnEnd(i, result, collect); };
      const Operation started = StartOperation(std::move(params));
      // Has it ended already, keeping it does no harm: it holds nothing of this call.
      if (!Keep(started)) started.Cancel();
    }
  }

  CallResult Wait() override ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_, absl::Condition(this, &SplitCall::HasEnded));
    return *result_;
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    for (const Operation& request : Stop()) request.Cancel();
  }

 private:
  bool HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return result_.has_value(); }

  bool IsStopped() ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    return stopped_;
  }

  // False if it is to be cancelled.
  bool Keep(const Operation& started) ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    started_.push_back(started);
    return !stopped_;
  }

  // What is to be cancelled, outside the lock.
  std::vector<Operation> Stop() ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    stopped_ = true;
    return started_;
  }

  void OnEnd(size_t index, const CallResult& result, const std::function<void()>& collect)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    if (result.ok() && collect) collect();
    bool is_last;
    {
      const absl::MutexLock lock(&mutex_);
      if (result.ok()) {
        reports_[index] = *result;
      } else if (failure_.ok()) {
        failure_ =
            WithMessage(result.status(), absl::StrCat("stream ", index + 1, " of ", reports_.size(),
                                                      ": ", result.status().message()));
      }
      is_last = --running_ == 0;
    }
    if (is_last) return End();
    if (!result.ok()) Cancel();
  }

  // Alone: nothing runs any more.
  void End() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<Operation> started;
    CallResult result = Result();
    if (done_) done_(result);
    done_ = nullptr;
    const absl::MutexLock lock(&mutex_);
    started.swap(started_);
    result_ = std::move(result);
  }

  CallResult Result() ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    return MergeReports(request_id_, std::move(reports_));
  }

  const std::string request_id_;
  std::function<void(const CallResult&)> done_;  // used by End only

  absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Operation> started_ ABSL_GUARDED_BY(mutex_);
  std::vector<CallReport> reports_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);  // the first
  size_t running_ ABSL_GUARDED_BY(mutex_);
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Operation StartSplitOperation(SplitParams params) {
  std::vector<SplitRequest> requests = std::move(params.requests);
  params.requests.resize(requests.size());
  auto call = std::make_shared<SplitCall>(std::move(params));
  call->Start(std::move(requests));
  return Operation(call);
}

}  // namespace ringattn::client
