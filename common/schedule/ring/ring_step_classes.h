// The step classes of a ring, flat or double (step_classes.h).
//
// What a rank does in a visit follows from a few blocks: those that it computes on, sends and
// receives, and its own, whose gradients come back. A visit's key lists the numbers of these blocks
// and of the work with them, and what else enters the builder's decisions: slots, flags, lanes.
// Gradients leave a step after their call and are added a step later, so the class of an entry of
// the backward pass is the keys of its visit and of the three before; that of the forward pass, the
// keys of its visit and of the one before, whose calls transfers may have to wait for.
//
// Tests: common/plan/testing/step_classes_test.cc, recorded_plans_test.cc
#ifndef RINGATTN_COMMON_SCHEDULE_RING_RING_STEP_CLASSES_H_
#define RINGATTN_COMMON_SCHEDULE_RING_RING_STEP_CLASSES_H_

#include <memory>
#include <utility>
#include <vector>

#include "common/schedule/ring.h"
#include "common/schedule/ring/ring_work.h"
#include "common/schedule/step_classes.h"

namespace ringattn {

class RingStepClasses : public ClassedPrograms {
 public:
  // `context`'s values and `route` must outlive it.
  //   host_of_rank  as for LaneBetween
  // REQUIRES: a backward has no sinks.
  RingStepClasses(const ScheduleContext& context, const RingRoute& route,
                  const std::vector<int>& host_of_rank);

  const StepClasses& classes() const override { return classes_; }
  Program MakePart(int rank, int begin, int end) const override;

 private:
  struct Entry;

  void AddEntries();
  void AddShardBuffers();

  const ScheduleContext context_;
  const RingRoute& route_;
  const std::vector<int>& host_of_rank_;
  const RingWork work_;
  std::vector<Entry> entries_;
  // By rank: the visits with the first and the last call of a forward pass; {-1, -1}: none.
  std::vector<std::pair<int, int>> forward_calls_;
  StepClasses classes_;
};

// Returns the classes of a ring's steps. Null for a backward with sinks, whose gradients all go to
// rank 0: no two ranks have equal steps.
std::unique_ptr<const ClassedPrograms> FindRingStepClasses(const ScheduleContext& context,
                                                           const RingRoute& route,
                                                           const std::vector<int>& host_of_rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_RING_RING_STEP_CLASSES_H_
