// PlanCache: recent plans, for equal requests. A model's layers and steps request the same plan
// repeatedly.
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

// All inputs of a plan. Keys are equal only if all inputs are; `fingerprint` only finds candidates.
struct PlanKey {
  uint64_t fingerprint = 0;
  std::shared_ptr<const AttentionSpec> spec;  // not null
  Direction direction = Direction::kForward;
  PlanChoice choice;
  PlannerInputs inputs;
};
// Returns the memory that an entry occupies, including its document boundaries.
int64_t KeyBytes(const AttentionSpec& spec);

using SharedPlan = absl::StatusOr<std::shared_ptr<const Plan>>;

// Evicts the least recently used entries. Errors are cached as well. Not thread safe.
class PlanCache {
 public:
  explicit PlanCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Returns nullopt if no plan of an equal request is known.
  std::optional<SharedPlan> Find(const PlanThis& request);
  // A plan that alone exceeds the bound is not stored.
  void Put(const PlanThis& request, SharedPlan plan);
  int64_t bytes() const { return bytes_; }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    PlanKey key;
    SharedPlan plan;
    int64_t bytes = 0;
  };
  using Entries = std::list<Entry>;  // most recently used first

  Entries::iterator Locate(const PlanThis& request);
  void Remove(Entries::iterator entry);

  const int64_t max_bytes_;
  int64_t bytes_ = 0;
  Entries entries_;
  std::unordered_multimap<uint64_t, Entries::iterator> by_fingerprint_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_PLANNING_PLAN_CACHE_H_
