// Forward calls that begin before all of their keys have come.
//
// A ring's forward has a call for each step: on the rank's own keys while the next ones travel,
// then on those. Each writes and reads partial results, begins with a device that is idle and ends
// with one that is half idle. Where a kernel waits for keys itself (Device::TakesLateKeys), one
// call has the keys of two steps: queries see their own keys first, and there is no partial result.
#ifndef RINGATTN_WORKER_EXECUTOR_LATE_KEYS_H_
#define RINGATTN_WORKER_EXECUTOR_LATE_KEYS_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "common/program/program.h"

namespace ringattn::worker {

// Makes one call of two forward calls in steps behind one another, where the second one's keys are
// what the first one's step receives; these become late (KvOperand::late). Where the first step has
// no call, as all_gather's, the second one's call moves there if some of its keys are the rank's
// own. The steps stay, with their transfers: peers notice nothing. Not where that would hold a
// transfer up: one beside the second call that comes into the first one's keys; nor where the rank
// sends itself something in that step, which may need the units that the kernel has. What no
// operation uses any more becomes empty.
//   takes  whether the device's kernel for the joined call waits for its late keys
Program JoinLateKeys(Program program, absl::FunctionRef<bool(const ComputeCall&)> takes);

// The longer of the ways of a step's transfers: its group ends when both are through, and with it
// the wait for late keys.
int64_t LongerWayBytes(const Step& step);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_LATE_KEYS_H_
