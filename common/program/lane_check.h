// Checks the lanes of programs. Lanes progress independently of each other, so a transfer between
// hosts can be in flight while later steps run. If another access reuses its bytes too early, the
// executor waits: the result is still right, but one lane then holds up the other.
//
// Tests: lane_check_test.cc
#ifndef RINGATTN_COMMON_PROGRAM_LANE_CHECK_H_
#define RINGATTN_COMMON_PROGRAM_LANE_CHECK_H_

#include <cstddef>
#include <string>
#include <vector>

#include "common/program/program.h"

namespace ringattn {

// Returns an empty string if the programs of all ranks follow these rules, else the first violation
// with rank, step and buffer:
//   - All transfers between two ranks are in one lane. A send and its receive may take equally many
//     steps.
//   - Transfer::steps is 1 inside a host, and no transfer lasts longer than the program.
//   - While a transfer between hosts may be in flight (Transfer::steps), no other transfer, of
//     either lane, and no call writes the bytes that it sends or accesses the bytes that it
//     receives. The calls of its last step are excepted, because they follow the transfer.
// A send without a receive is not a violation here; simulators report it.
std::string CheckLanes(const std::vector<Program>& programs);

// Returns the transfers whose last step is `step`, in program order: those that a simulator carries
// out at that step.
std::vector<Transfer> EndingAt(const Program& program, size_t step);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROGRAM_LANE_CHECK_H_
