// Assigns optional tensors to the operands of kernel calls. Schedule and executor pass a new
// optional tensor through without naming it, so only this file needs to know its operand.
#ifndef RINGATTN_WORKER_KERNELS_OPTION_OPERANDS_H_
#define RINGATTN_WORKER_KERNELS_OPTION_OPERANDS_H_

#include "common/attention/attention_spec.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// Sets the operand for `tensor`. Returns false if this kind of call has none. `address`: memory of
// the call's device.
bool SetOptionOperand(TensorId tensor, void* address, KernelCall& call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_OPTION_OPERANDS_H_
