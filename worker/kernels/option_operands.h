// Where a kernel call takes tensors that only some requests have: one place, so that a new one
// passes through the schedule and the executor without being named there.
#ifndef RINGATTN_WORKER_KERNELS_OPTION_OPERANDS_H_
#define RINGATTN_WORKER_KERNELS_OPTION_OPERANDS_H_

#include "common/attention/attention_spec.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// False if this kind of call has no such operand. `address`: device memory of the call.
bool SetOptionOperand(TensorId tensor, void* address, KernelCall& call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_OPTION_OPERANDS_H_
