// Access: which bytes a transfer or a compute call reads and writes.
#ifndef RINGATTN_COMMON_PROGRAM_ACCESS_H_
#define RINGATTN_COMMON_PROGRAM_ACCESS_H_

#include <vector>

#include "common/program/program.h"

namespace ringattn {

struct Access {
  ByteRange range;
  bool write = false;
};

// Returns true if the order of two accesses matters: one writes what the other accesses.
bool Conflict(const Access& a, const Access& b);
// Returns true if the order of two operations with these accesses matters.
bool Conflict(const std::vector<Access>& a, const std::vector<Access>& b);

Access AccessOf(const Transfer& transfer);
// Returns the byte ranges that the call reads and writes.
std::vector<Access> AccessesOf(const ComputeCall& call);
// Returns whether both calls are backwards whose order matters only for sums of dq.
bool OnlyAddToTheSame(const ComputeCall& a, const ComputeCall& b);
// Returns those of them that are late keys, by the step after the call's that receives them.
std::vector<std::vector<Access>> LateReadsOf(const ComputeCall& call);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROGRAM_ACCESS_H_
