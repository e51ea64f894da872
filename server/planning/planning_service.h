// PlanningService: makes plans on separate threads, so that planning never delays the core's
// thread, which handles the workers' heartbeats.
//
//   core --PlanThis--> [queue, fair by client] --> threads --Planned--> core
//                          CancelPlan
//
// The queue and each plan's time are bounded, and a cancelled plan stops. One thread takes only
// plans that take milliseconds, so that a request with few documents never waits for one with a
// hundred thousand.
#ifndef RINGATTN_SERVER_PLANNING_PLANNING_SERVICE_H_
#define RINGATTN_SERVER_PLANNING_PLANNING_SERVICE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/core/events/events.h"
#include "server/core/requests/fair_order.h"
#include "server/planning/plan_cache.h"

namespace ringattn::server {

struct PlanningOptions {
  // In addition to the thread for light plans.
  int threads = 1;
  // Plans with at most this PlanThis::cost_seconds are light.
  double light_seconds = 0.005;
  int64_t max_queued = 256;
  int64_t max_queued_bytes = kGiB;
  int64_t cache_bytes = 64 * kMiB;
  absl::Duration time_max = absl::Seconds(10);
};
PlanningOptions PlanningOptionsOf(const Limits& limits);

struct PlanningStats {
  int64_t queued = 0;
  int64_t made = 0;
  int64_t from_cache = 0;
  int64_t cancelled = 0;
  int64_t cache_bytes = 0;
};

// Thread safe. The lock is held briefly, never while a plan is made.
class PlanningService {
 public:
  // Called on any thread, once per plan that Submit did not return and that was not cancelled. Must
  // not block.
  using Done = std::function<void(Planned)>;
  // Makes a plan; tests replace it.
  using Planner = std::function<absl::StatusOr<Plan>(const PlanThis&, const PlanControl&)>;

  PlanningService(const PlanningOptions& options, Done done);
  PlanningService(const PlanningOptions& options, Done done, Planner planner);
  // Cancels the remaining plans.
  ~PlanningService();

  // Plans the request. Replaces an earlier one of this stream. Returns the answer if the cache has
  // the plan, or RESOURCE_EXHAUSTED if too many are queued. Otherwise returns nullopt, and Done
  // answers: with DEADLINE_EXCEEDED if the plan takes longer than time_max.
  std::optional<Planned> Submit(PlanThis request) ABSL_LOCKS_EXCLUDED(mutex_);
  // No effect if no plan of this stream is queued or running.
  void Cancel(StreamId stream) ABSL_LOCKS_EXCLUDED(mutex_);
  PlanningStats stats() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Ticket = FairOrder::Id;
  struct Job {
    PlanThis request;
    int64_t bytes = 0;
    bool running = false;
    std::atomic<bool> cancelled = false;
  };

  void Work(bool only_light);
  std::shared_ptr<Job> TakeNext(bool only_light) ABSL_LOCKS_EXCLUDED(mutex_);
  bool FindNext(bool only_light, Ticket* next) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Finish(const Job& job, SharedPlan plan, double seconds) ABSL_LOCKS_EXCLUDED(mutex_);
  SharedPlan Make(const Job& job) const;
  void Forget(StreamId stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const PlanningOptions options_;
  const Done done_;
  const Planner planner_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  FairOrder order_ ABSL_GUARDED_BY(mutex_);
  std::map<Ticket, std::shared_ptr<Job>> queue_ ABSL_GUARDED_BY(mutex_);
  std::map<StreamId, Ticket> tickets_ ABSL_GUARDED_BY(mutex_);  // queued or running
  std::map<Ticket, std::shared_ptr<Job>> running_ ABSL_GUARDED_BY(mutex_);
  int64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  Ticket last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  PlanCache cache_ ABSL_GUARDED_BY(mutex_);
  PlanningStats stats_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_PLANNING_PLANNING_SERVICE_H_
