// StepClasses: which steps of which ranks' programs cost the same.
//
// A ring of W ranks has W^2 steps. Most are equal but for the numbers of the ranks: each rank
// computes on a block while the block before goes to one neighbour and the next comes from the
// other. So the cost model needs the steps of few ranks. Steps of one class have the same calls and
// transfers with the same bytes, and the same conflicts between them, in buffers of the same names;
// only ranks differ. Their peers are at the same distances: of groups, and of places in the group.
#ifndef RINGATTN_COMMON_SCHEDULE_STEP_CLASSES_H_
#define RINGATTN_COMMON_SCHEDULE_STEP_CLASSES_H_

#include <cstdint>
#include <vector>

#include "common/program/program.h"

namespace ringattn {

struct StepClasses {
  int group_size = 1;  // ranks per group
  // The steps of a program are divided into entries, alike on all ranks: entry e has the steps
  // [first_step[e], first_step[e + 1]).
  std::vector<int> first_step;
  std::vector<int32_t> class_of;  // by rank, then entry
  struct Representative {
    int rank = 0;
    int entry = 0;
  };
  // By class: the first rank and its first entry that have it, ascending.
  std::vector<Representative> representatives;
  // The buffers of a rank's shards, as they are before steps use them; ranks with equally many rows
  // have equal ones.
  std::vector<std::vector<BufferSpec>> shard_buffers;
  std::vector<int32_t> shard_buffers_of;  // by rank

  int entries() const { return static_cast<int>(first_step.size()) - 1; }
};

// The classes of a schedule's programs, and the programs of their representatives. Borrows the
// ScheduleBuilder that found them.
class ClassedPrograms {
 public:
  virtual ~ClassedPrograms() = default;
  virtual const StepClasses& classes() const = 0;
  // Returns the program of a rank with the right steps in entries [begin, end). Other steps lack
  // calls and transfers, and buffers may be smaller than the program's.
  virtual Program MakePart(int rank, int begin, int end) const = 0;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_STEP_CLASSES_H_
