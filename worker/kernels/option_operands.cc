#include "worker/kernels/option_operands.h"

namespace ringattn::worker {
namespace {

template <typename Call, typename Element>
bool Set(const Element* Call::*field, void* address, KernelCall& call) {
  auto* typed = std::get_if<Call>(&call);
  if (typed != nullptr) typed->*field = static_cast<const Element*>(address);
  return typed != nullptr;
}

}  // namespace

bool SetOptionOperand(TensorId tensor, void* address, KernelCall& call) {
  switch (tensor) {
    case TensorId::kSinks:
      return Set(&ForwardCall::sinks, address, call) ||
             Set(&SinkGradientCall::sinks, address, call);
    case TensorId::kDlse:
      return Set(&DeltaCall::dlse, address, call);
    default:
      return false;
  }
}

}  // namespace ringattn::worker
