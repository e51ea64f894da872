#include "server/planning/planning_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/process/thread_priority.h"
#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

absl::StatusOr<Plan> MakePlan(const PlanThis& request, const PlanControl& control) {
  return PlanRequest(*request.spec, request.direction, request.choice, request.inputs, control);
}

}  // namespace

PlanningOptions PlanningOptionsOf(const Limits& limits) {
  PlanningOptions options;
  options.max_queued = limits.max_queued_requests;
  options.cache_bytes = limits.plan_cache_bytes;
  options.time_max = limits.planning_time_max;
  return options;
}

PlanningService::PlanningService(const PlanningOptions& options, Done done)
    : PlanningService(options, std::move(done), MakePlan) {}

PlanningService::PlanningService(const PlanningOptions& options, Done done, Planner planner)
    : options_(options),
      done_(std::move(done)),
      planner_(std::move(planner)),
      cache_(options.cache_bytes) {
  threads_.emplace_back([this] { Work(/*only_light=*/true); });
  for (int i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this] { Work(/*only_light=*/false); });
  }
}

PlanningService::~PlanningService() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (auto& [ticket, job] : running_) job->cancelled = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

std::optional<Planned> PlanningService::Submit(PlanThis request) {
  Planned planned{request.stream, request.generation, absl::UnknownError(""), 0};
  absl::MutexLock lock(&mutex_);
  Forget(request.stream);
  if (std::optional<SharedPlan> known = cache_.Find(request)) {
    ++stats_.from_cache;
    planned.plan = *std::move(known);
    return planned;
  }
  const int64_t bytes = KeyBytes(*request.spec);
  if (static_cast<int64_t>(queue_.size()) >= options_.max_queued ||
      queued_bytes_ > options_.max_queued_bytes - bytes) {
    planned.plan = absl::ResourceExhaustedError(
        absl::StrCat(queue_.size(), " requests are waiting for their plans already"));
    return planned;
  }
  const Ticket ticket = ++last_ticket_;
  order_.Enter(ticket, request.client, request.cost_seconds);
  tickets_[request.stream] = ticket;
  auto job = std::make_shared<Job>();
  job->request = std::move(request);
  job->bytes = bytes;
  queued_bytes_ += bytes;
  queue_.emplace(ticket, std::move(job));
  return std::nullopt;
}

void PlanningService::Cancel(StreamId stream) {
  absl::MutexLock lock(&mutex_);
  Forget(stream);
}

void PlanningService::Forget(StreamId stream) {
  const auto ticket = tickets_.find(stream);
  if (ticket == tickets_.end()) return;
  ++stats_.cancelled;
  if (const auto queued = queue_.find(ticket->second); queued != queue_.end()) {
    order_.Finish(ticket->second, 0);
    queued_bytes_ -= queued->second->bytes;
    queue_.erase(queued);
  } else {
    running_.at(ticket->second)->cancelled = true;
  }
  tickets_.erase(ticket);
}

PlanningStats PlanningService::stats() const {
  absl::MutexLock lock(&mutex_);
  PlanningStats stats = stats_;
  stats.queued = queue_.size();
  stats.cache_bytes = cache_.bytes();
  return stats;
}

// -------------------------------------------------------------- planning threads

void PlanningService::Work(bool only_light) {
  // Plans for long document lists use the CPU time that the process has to spare.
  if (!only_light) LowerThreadPriority();
  while (const std::shared_ptr<Job> job = TakeNext(only_light)) {
    const absl::Time since = MonotonicNow();
    SharedPlan plan = Make(*job);
    const double seconds = std::max(0.0, absl::ToDoubleSeconds(MonotonicNow() - since));
    Finish(*job, std::move(plan), seconds);
  }
}

bool PlanningService::FindNext(bool only_light, Ticket* next) const {
  bool found = false;
  order_.VisitWaiting([&](Ticket ticket, const std::string&) {
    const PlanThis& request = queue_.at(ticket)->request;
    found = !only_light || request.cost_seconds <= options_.light_seconds;
    if (!found) return FairOrder::Visit::kNext;
    *next = ticket;
    return FairOrder::Visit::kStop;
  });
  return found;
}

// Returns null when the service stops.
std::shared_ptr<PlanningService::Job> PlanningService::TakeNext(bool only_light) {
  absl::MutexLock lock(&mutex_);
  Ticket next = 0;
  const auto has_work = [&] {
    mutex_.AssertReaderHeld();
    return stopping_ || FindNext(only_light, &next);
  };
  mutex_.Await(absl::Condition(&has_work));
  if (stopping_) return nullptr;
  const auto queued = queue_.find(next);
  std::shared_ptr<Job> job = std::move(queued->second);
  queue_.erase(queued);
  queued_bytes_ -= job->bytes;
  running_[next] = job;
  order_.Start(next);
  return job;
}

SharedPlan PlanningService::Make(const Job& job) const {
  const absl::Time due = MonotonicNow() + options_.time_max;
  PlanControl control;
  control.cancelled = [&job, due] { return job.cancelled || MonotonicNow() > due; };
  absl::StatusOr<Plan> plan = planner_(job.request, control);
  if (plan.ok()) return std::make_shared<const Plan>(WithoutSpans(*std::move(plan)));
  if (absl::IsCancelled(plan.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("planning exceeded its limit of ", absl::FormatDuration(options_.time_max)));
  }
  return plan.status();
}

void PlanningService::Finish(const Job& job, SharedPlan plan, double seconds) {
  const PlanThis& request = job.request;
  {
    absl::MutexLock lock(&mutex_);
    const auto running = std::find_if(running_.begin(), running_.end(), [&](const auto& entry) {
      return entry.second.get() == &job;
    });
    const Ticket ticket = running->first;
    running_.erase(running);
    order_.Finish(ticket, seconds);
    if (job.cancelled || stopping_) return;
    if (const auto known = tickets_.find(request.stream);
        known != tickets_.end() && known->second == ticket) {
      tickets_.erase(known);
    }
    ++stats_.made;
    if (!absl::IsDeadlineExceeded(plan.status())) cache_.Put(request, plan);
  }
  done_(Planned{request.stream, request.generation, std::move(plan), seconds});
}

}  // namespace ringattn::server
