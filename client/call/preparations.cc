#include "client/call/preparations.h"

#include <algorithm>
#include <utility>

#include "client/transfer/server_error.h"
#include "common/base/monotonic_time.h"
#include "common/wire/durations.h"

namespace ringattn::client {
namespace {

// A part survives two renewals that fail.
constexpr int kRenewalsPerTtl = 3;

}  // namespace

class Preparations::Part final : public PreparedCall::State {
 public:
  Part(std::shared_ptr<const CallPlan> plan, CallReport report)
      : plan_(std::move(plan)),
        report_(std::move(report)),
        interval_(ToDuration(report_.summary.prepared().ttl()) / kRenewalsPerTtl),
        due_(MonotonicNow() + interval_) {}

  const CallReport& report() const override { return report_; }
  absl::Status trouble() const override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return trouble_;
  }
  void SetTrouble(absl::Status trouble) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    trouble_ = std::move(trouble);
  }

  const std::shared_ptr<const CallPlan>& plan() const { return plan_; }
  absl::Duration interval() const { return interval_; }
  // Used under the lock of Preparations.
  absl::Time due() const { return due_; }
  void SetDue(absl::Time due) { due_ = due; }

 private:
  const std::shared_ptr<const CallPlan> plan_;
  const CallReport report_;
  const absl::Duration interval_;
  absl::Time due_;
  mutable absl::Mutex mutex_;
  absl::Status trouble_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<PreparedCall> Preparations::Prepare(CallPlan plan, absl::Duration deadline) {
  auto shared = std::make_shared<const CallPlan>(std::move(plan));
  CallResult made = start_(shared, deadline, nullptr).Wait();
  if (!made.ok()) return made.status();
  if (!(ToDuration(made->summary.prepared().ttl()) > absl::ZeroDuration())) {
    return ServerError("a request with `prepare` ended without Summary.prepared");
  }
  auto part = std::make_shared<Part>(std::move(shared), *std::move(made));
  absl::MutexLock lock(&mutex_);
  parts_.push_back(part);
  grown_ = true;
  if (!stopping_ && !thread_.joinable()) thread_ = std::thread([this] { Run(); });
  return PreparedCall(std::move(part));
}

void Preparations::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Preparations::Run() {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || grown_; };
  while (true) {
    std::vector<std::shared_ptr<Part>> due;
    {
      absl::MutexLock lock(&mutex_);
      absl::Time next = absl::InfiniteFuture();
      for (const std::weak_ptr<Part>& weak : parts_) {
        if (const auto part = weak.lock()) next = std::min(next, part->due());
      }
      AwaitUntil(mutex_, absl::Condition(&has_news), next);
      if (stopping_) return;
      grown_ = false;
      due = TakeDue(MonotonicNow());
    }
    for (const std::shared_ptr<Part>& part : due) Renew(part);
  }
}

std::vector<std::shared_ptr<Preparations::Part>> Preparations::TakeDue(absl::Time now) {
  std::vector<std::shared_ptr<Part>> due;
  const auto ended =
      std::remove_if(parts_.begin(), parts_.end(), [](const auto& weak) { return weak.expired(); });
  parts_.erase(ended, parts_.end());
  for (const std::weak_ptr<Part>& weak : parts_) {
    auto part = weak.lock();
    if (part == nullptr || part->due() > now) continue;
    part->SetDue(now + part->interval());
    due.push_back(std::move(part));
  }
  return due;
}

// Ends before the next renewal of the part begins. The handle may be dropped meanwhile.
void Preparations::Renew(const std::shared_ptr<Part>& part) {
  start_(part->plan(), part->interval(),
         [weak = std::weak_ptr<Part>(part)](const CallResult& made) {
           if (const auto alive = weak.lock()) alive->SetTrouble(made.status());
         });
}

}  // namespace ringattn::client
