// The keys of the visits of a ring: tuples of numbers that are equal only where ranks take equal
// steps (ring_step_classes.h).
#ifndef RINGATTN_COMMON_SCHEDULE_RING_STEP_KEYS_H_
#define RINGATTN_COMMON_SCHEDULE_RING_STEP_KEYS_H_

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "common/schedule/ring.h"
#include "common/schedule/ring_backward.h"
#include "common/schedule/route/ring_work.h"
#include "common/schedule/route/tuple_numbers.h"

namespace ringattn {

// Most visits before its own on which a rank's steps in a visit depend.
inline constexpr int kMostVisitsBefore = 3;

// A tuple under construction. Its first number is the form, which determines the meaning of the
// others.
class StepKey {
 public:
  explicit StepKey(int width) : values_(width, TupleNumbers::kNone) {}

  void Clear() {
    std::fill(values_.begin(), values_.begin() + count_, TupleNumbers::kNone);
    count_ = 0;
  }
  void Add(int32_t value) {
    assert(count_ < values_.size());
    values_[count_++] = value;
  }
  const int32_t* data() const { return values_.data(); }

 private:
  std::vector<int32_t> values_;
  size_t count_ = 0;
};

// Computes the keys of one rank after the other. Not thread safe.
class RingStepKeys {
 public:
  // All arguments must outlive it.
  //   host_of_rank  as for LaneBetween
  RingStepKeys(const ScheduleContext& context, const RingRoute& route, const RingWork& work,
               const std::vector<int>& host_of_rank);

  // Returns an upper bound of the numbers in a key.
  int width() const;

  // Returns the number of a visit's form: what is the same on every rank.
  //   visit  the number of visits: the step of the own blocks, at the end of a backward pass
  int32_t FormOf(bool backward, int visit);

  // Returns the visits with a rank's first and last call of a forward pass; {-1, -1}: none.
  std::pair<int, int> CallsOf(int rank) const;

  // Sets the key of a rank's visit.
  //   form   FormOf the visit
  //   calls  CallsOf the rank
  void Set(int rank, bool backward, int visit, int32_t form, const std::pair<int, int>& calls,
           StepKey& key);

 private:
  // The transfers that begin in a visit, and the sums that are added in it.
  struct VisitLinks {
    std::vector<int> fetches;  // the visits whose blocks start to travel
    std::vector<int> sums;     // the collectors whose sums have arrived at the owners
  };
  // Numbers lists of integers.
  class ListNumbers {
   public:
    int32_t NumberOf(const std::vector<int64_t>& list) {
      return numbers_.try_emplace(list, static_cast<int32_t>(numbers_.size())).first->second;
    }

   private:
    std::map<std::vector<int64_t>, int32_t> numbers_;
  };

  // Returns whether the holder at the visit adds up an outer round.
  bool Collects(int visit) const;
  // Returns how many of `count` steps some rank uses.
  int64_t UsedSteps(int64_t first, int64_t count) const;
  void AddFetchTo(bool backward, int fetched, std::vector<int64_t>& form) const;
  void AddFlag(bool value);
  // Adds the lane of transfers to or from a peer.
  void AddLane(int peer);
  // Adds the block that arrives at the rank, the one that leaves it, and where they were before.
  void SetFetch(int visit, int fetched, StepKey& key);
  // Adds the blocks whose gradients the rank receives or sends. REQUIRES: visit > 0.
  void SetGradients(int visit, int source, StepKey& key);
  bool HasWork(int visit, int source) const;
  bool SameRanges(int32_t a, int32_t b) const;
  // Returns the number of the rank's calls on its own block, at the end of a backward pass.
  int32_t OwnCallsOf(int rank);

  const KvRoute& route_;
  const BlockSlots& slots_;
  const RingSpans& pieces_;
  const RingWork& work_;
  const AttentionSpec& spec_;
  const std::vector<int>& host_of_rank_;
  const BackwardSteps backward_steps_;
  std::vector<VisitLinks> links_;  // by visit; the last is the step of the own blocks
  std::vector<int64_t> used_until_;
  ListNumbers lists_;
  std::vector<int32_t> rows_;  // by rank

  // State while a key is set.
  int rank_ = 0;
  int32_t flags_ = 0;
  int flag_ = 0;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_STEP_KEYS_H_
