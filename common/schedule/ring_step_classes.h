// The step classes of a ring, flat or double (step_classes.h).
//
// A few blocks determine a rank's steps in a visit: those that it computes on, sends and receives,
// and the rank's block, whose gradients come back. A visit's key lists the numbers of these blocks,
// the number of the work with them, and the other inputs of the builder's decisions: slots, flags
// and lanes.
// Gradients leave a step after their call and are added a step later. So the class of an entry is
// the keys of its visit and of up to three before: one in the forward pass, whose transfers may
// have to wait for the last calls, and in the backward pass as many as have these steps.
//
// Tests: common/plan/testing/step_classes_test.cc, recorded_plans_test.cc
#ifndef RINGATTN_COMMON_SCHEDULE_RING_STEP_CLASSES_H_
#define RINGATTN_COMMON_SCHEDULE_RING_STEP_CLASSES_H_

#include <memory>
#include <utility>
#include <vector>

#include "common/schedule/ring.h"
#include "common/schedule/route/ring_work.h"
#include "common/schedule/step_classes.h"

namespace ringattn {

class RingStepClasses : public ClassedPrograms {
 public:
  // `context`'s values and `route` must outlive it.
  //   host_of_rank  as for LaneBetween
  // REQUIRES: a backward has no sinks.
  RingStepClasses(const ScheduleContext& context, const RingRoute& route,
                  const std::vector<int>& host_of_rank);
  ~RingStepClasses() override;

  // Returns whether some rank uses a step of every entry. Otherwise the classes are not valid:
  // steps of entries that are further apart are then neighbours.
  bool AllEntriesUsed() const;

  const StepClasses& classes() const override { return classes_; }
  Program MakePart(int rank, int begin, int end) const override;

 private:
  struct Entry;

  void AddEntries();
  int UsedSteps(const Entry& entry) const;  // by some rank
  void AddShardBuffers();

  const ScheduleContext context_;
  const RingRoute& route_;
  const std::vector<int>& host_of_rank_;
  const RingWork work_;
  std::vector<Entry> entries_;
  int backward_window_ = 0;  // entries before its own on which one of the backward pass depends
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

#endif  // RINGATTN_COMMON_SCHEDULE_RING_STEP_CLASSES_H_
