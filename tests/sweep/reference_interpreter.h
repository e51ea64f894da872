// The executor's deliberately dumb twin: runs the programs of all ranks in
// lockstep, in one thread, straight from the words of common/schedule/schedule.h: in each
// step the transfers of all ranks as one group, then each rank's calls in order.
//
// Checks while it does so: transfers match one to one and in size, every range lies inside its
// buffer, buffers have the sizes that schedule.h gives them, nothing writes outside a buffer.
// Everything but the inputs starts as NaN, so a value that is read before it was written shows in
// the result.
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_INTERPRETER_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_INTERPRETER_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"
#include "tests/sweep/reference_memory.h"
#include "tests/sweep/reference_problems.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

using Kernels = std::function<absl::Status(const KernelCall&)>;

// INTERNAL with the rank, step and reason if the schedule breaks a rule above;
// otherwise the output tensors, or what `kernels` returned.
absl::StatusOr<TensorMap> Interpret(const AttentionSpec& spec, const ShardPlan& plan,
                                    const Schedule& schedule, const TensorMap& inputs,
                                    const Kernels& kernels, Cut cut = Cut::kPieces);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_INTERPRETER_H_
