#include "worker/kernels/option_operands.h"

namespace ringattn::worker {
namespace {

template <typename Call, typename Element>
bool Set(const Element* Call::*field, void* address, KernelCall& call) {
  auto* typed = std::get_if<Call>(&call);
  if (typed != nullptr) typed->*field = static_cast<const Element*>(address);
  return typed != nullptr;
}

// Sets one of the score terms, which all calls with keys have.
template <typename Element>
bool SetTerm(const Element* TermOperands::*field, void* address, KernelCall& call) {
  const auto set = [&](auto* typed) {
    if (typed != nullptr) typed->terms.*field = static_cast<const Element*>(address);
    return typed != nullptr;
  };
  return set(std::get_if<ForwardCall>(&call)) || set(std::get_if<BackwardCall>(&call)) ||
         set(std::get_if<BiasGradientCall>(&call)) || set(std::get_if<ProbabilitiesCall>(&call));
}

}  // namespace

bool SetOptionOperand(TensorId tensor, void* address, KernelCall& call) {
  switch (tensor) {
    case TensorId::kSinks:
      return Set(&ForwardCall::sinks, address, call) || Set(&MergeCall::sinks, address, call) ||
             Set(&ScatterCall::sinks, address, call) ||
             Set(&SinkGradientCall::sinks, address, call);
    case TensorId::kDlse:
      return Set(&DeltaCall::dlse, address, call);
    case TensorId::kBias:
      return SetTerm(&TermOperands::bias, address, call);
    case TensorId::kMask:
      return SetTerm(&TermOperands::mask, address, call);
    case TensorId::kQSegmentIds:
      return SetTerm(&TermOperands::q_segment_ids, address, call);
    default:
      return false;
  }
}

}  // namespace ringattn::worker
