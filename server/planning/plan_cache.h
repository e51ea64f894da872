// PlanCache: plans of the last requests, for equal ones: a model's layers and steps ask for
// the same plan again and again.
#ifndef RINGATTN_SERVER_PLANNING_PLAN_CACHE_H_
#define RINGATTN_SERVER_PLANNING_PLAN_CACHE_H_

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// What a plan follows from. Equal only if everything is: `fingerprint` finds candidates.
struct PlanKey {
  uint64_t fingerprint = 0;
  std::shared_ptr<const AttentionSpec> spec;  // not null
  Direction direction = Direction::kForward;
  PlanChoice choice;
  PlannerInputs inputs;

  bool operator==(const PlanKey& other) const;
};
PlanKey KeyOf(const PlanThis& request);
// What keeping it takes, its document boundaries included.
int64_t BytesOf(const PlanKey& key);

using SharedPlan = absl::StatusOr<std::shared_ptr<const Plan>>;

// The least lately used go first. Refusals are kept as well. Not thread safe.
class PlanCache {
 public:
  explicit PlanCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Nothing if it is not known.
  std::optional<SharedPlan> Find(const PlanKey& key);
  // What alone is larger than the bound is not kept.
  void Put(PlanKey key, SharedPlan plan);
  int64_t bytes() const { return bytes_; }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    PlanKey key;
    SharedPlan plan;
    int64_t bytes = 0;
  };
  using Entries = std::list<Entry>;  // the last used first

  Entries::iterator Locate(const PlanKey& key);
  void Remove(Entries::iterator entry);

  const int64_t max_bytes_;
  int64_t bytes_ = 0;
  Entries entries_;
  std::unordered_multimap<uint64_t, Entries::iterator> by_fingerprint_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_PLANNING_PLAN_CACHE_H_
