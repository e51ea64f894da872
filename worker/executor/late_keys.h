// Forward calls that start before all of their keys have arrived.
//
// A ring's forward has one call per step: first on the rank's own keys while the next block
// travels, then on that block. Each call reads and writes partial results, and the device is partly
// idle at the start and end of each. If the kernel can wait for keys itself
// (Device::TakesLateKeys), one call covers the keys of several steps. It processes the rank's own
// keys first and then the others in the order in which they arrive. A call that covers all steps
// writes no partial result.
#ifndef RINGATTN_WORKER_EXECUTOR_LATE_KEYS_H_
#define RINGATTN_WORKER_EXECUTOR_LATE_KEYS_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/program/access.h"
#include "common/program/lane.h"
#include "common/program/program.h"

namespace ringattn::worker {

// Merges forward calls of consecutive steps and returns the new program.
//
// A later step's call joins an earlier one if the step before the later one receives its keys.
// These keys become late (KvOperand::late). If the first step has no call (all_gather), the second
// step's call moves there, provided that some of its keys are the rank's own. Steps keep their
// transfers, so peers are unaffected. Buffers that are no longer used become empty. Received blocks
// get separate memory (separate_blocks.h) if more calls can then be merged and the program takes no
// more memory than before.
//
// Calls stay separate if merging would delay a transfer: a step receives into keys of the merged
// call that have arrived, or a transfer of a step that brings keys may need compute units that the
// kernel occupies. That applies to transfers of either lane: those of the rank with itself and
// those of `takes_units`. Calls also stay separate if keys arrive in a lane that is too slow to
// wait for.
//   takes        returns whether the device's kernel for the merged call waits for its late keys
//   takes_units  returns whether transfers with this rank use compute units
//   may_be_late  returns whether a kernel may wait for keys that arrive in this lane
Program JoinLateKeys(
    Program program, absl::FunctionRef<bool(const ComputeCall&)> takes,
    absl::FunctionRef<bool(int peer)> takes_units = [](int) { return false; },
    absl::FunctionRef<bool(Lane lane)> may_be_late = [](Lane) { return true; });

// Returns the larger of the bytes sent and received in the lane in a step. The lane's transfer
// group, and with it the wait for late keys, ends when both directions are done.
int64_t LongerWayBytes(const Step& step, Lane lane);

// Returns whether the step receives some of the accessed bytes in the lane.
bool BringsInLane(const Step& step, Lane lane, const std::vector<Access>& accesses);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_LATE_KEYS_H_
