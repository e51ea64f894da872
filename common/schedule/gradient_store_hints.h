// Adds hints to store gradients of keys rounded, wherever a program permits it.
#ifndef RINGATTN_COMMON_SCHEDULE_GRADIENT_STORE_HINTS_H_
#define RINGATTN_COMMON_SCHEDULE_GRADIENT_STORE_HINTS_H_

#include "common/program/program.h"

namespace ringattn {

// Adds a store hint (ComputeCall::store_hint) to each backward call that meets three conditions:
// its operands' dk and dv are sums to which no other call adds, the call adds to all of their
// bytes, and only a kConvert reads them, no transfer and no other call. This holds in a program of
// one rank, and in a ring for a rank whose keys only its own queries see. REQUIRES: the program has
// no hints.
void AddStoreHints(Program& program);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_GRADIENT_STORE_HINTS_H_
