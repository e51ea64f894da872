// Offers to store gradients of keys as they are returned, in whatever program they are right.
#ifndef RINGATTN_COMMON_SCHEDULE_GRADIENT_STORE_HINTS_H_
#define RINGATTN_COMMON_SCHEDULE_GRADIENT_STORE_HINTS_H_

#include "common/program/program.h"

namespace ringattn {

// Adds an offer (ComputeCall::offer) to every backward call whose operands' dk and dv are sums that
// it alone adds to, all of their bytes, and that nothing but a kConvert reads: no transfer, no
// other call. So in a program of one rank, and in a ring where a rank's keys are seen by its own
// queries alone. The program has none before.
void OfferToStoreGradients(Program& program);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_GRADIENT_STORE_HINTS_H_
