// Visits every tensor of a call's arguments and results.
#ifndef RINGATTN_CLIENT_CALL_CALL_TENSORS_H_
#define RINGATTN_CLIENT_CALL_CALL_TENSORS_H_

#include "client/api/call.h"

namespace ringattn::client {

// Calls visit(tensor&) for each tensor, empty ones included, always in the same order. `visit` may
// point tensors elsewhere.
template <typename Visit>
void ForEachTensor(ForwardArgs& args, const Visit& visit) {
  for (ConstBytes* tensor : {&args.q, &args.k, &args.v}) visit(*tensor);
  for (auto& [id, tensor] : args.more) visit(tensor);
}

template <typename Visit>
void ForEachTensor(ForwardResults& results, const Visit& visit) {
  for (MutableBytes* tensor : {&results.out, &results.lse}) visit(*tensor);
  for (auto& [id, tensor] : results.more) visit(tensor);
}

template <typename Visit>
void ForEachTensor(BackwardArgs& args, const Visit& visit) {
  for (ConstBytes* tensor : {&args.q, &args.k, &args.v, &args.dout, &args.out, &args.lse}) {
    visit(*tensor);
  }
  for (auto& [id, tensor] : args.more) visit(tensor);
}

template <typename Visit>
void ForEachTensor(BackwardResults& results, const Visit& visit) {
  for (MutableBytes* tensor : {&results.dq, &results.dk, &results.dv}) visit(*tensor);
  for (auto& [id, tensor] : results.more) visit(tensor);
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CALL_TENSORS_H_
