// The memory of all ranks in the interpreter (reference_interpreter.h): buffers between guards,
// poisoned but for the inputs, and what goes from one rank to another.
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_MEMORY_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"
#include "tests/sweep/poisoned_buffer.h"

namespace ringattn::tests {

// Whole tensors in the layouts of common/attention/attention_spec.h.
using TensorMap = std::map<TensorId, std::vector<uint8_t>>;

// A rule that a rank's program breaks.
absl::Status Broken(int rank, size_t step, const std::string& reason);

// Not thread safe. Errors: Broken.
class ReferenceMemory {
 public:
  // All outlive it.
  ReferenceMemory(const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule)
      : spec_(spec), plan_(plan), schedule_(schedule) {}

  // Makes every rank's buffers, with its shards of the inputs in them. Once, before the others.
  // REQUIRES: a program for each rank.
  absl::Status Allocate(const TensorMap& inputs);

  // The transfers whose last step this is, of all ranks as one group.
  absl::Status Exchange(size_t step);

  // Where a rank's range lies, which is inside its buffer.
  absl::StatusOr<uint8_t*> Address(int rank, size_t step, const ByteRange& range);

  // The whole output tensors, after so many steps; checks the guards.
  absl::StatusOr<TensorMap> Collect(size_t steps);

 private:
  absl::Status CopyShard(int rank, size_t id, TensorId tensor, uint8_t* whole, bool to_buffer);

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const Schedule& schedule_;
  std::vector<std::vector<PoisonedBuffer>> buffers_;  // [rank][buffer]
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_MEMORY_H_
