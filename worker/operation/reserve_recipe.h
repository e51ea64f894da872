// The recipe of a Reserve: everything in it that a prepared operation depends on.
#ifndef RINGATTN_WORKER_OPERATION_RESERVE_RECIPE_H_
#define RINGATTN_WORKER_OPERATION_RESERVE_RECIPE_H_

#include <string>

#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::worker {

// Returns whether the operation may be kept for equal requests. Not if it reads a residual or
// leaves one, because its buffers then belong to the residual.
bool MayBeKept(const v1::Reserve& reserve);

// Returns whether a Reserve with prepare_only is complete without tensors.
bool MayBePreparedOnly(const v1::Reserve& reserve);

// Returns the same bytes for two messages only if their operations are equal on this worker and
// belong to the same principal and generation. Everything counts that is not known to concern the
// single request, so that a new field cannot be forgotten. `reserve` is unchanged on return.
std::string RecipeOf(v1::Reserve& reserve);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_RESERVE_RECIPE_H_
