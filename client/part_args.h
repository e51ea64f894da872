// The memory of one part of a call: the call's own buffers, in pieces or, where a part
// has not all heads, as views; but for lse where a part has not all queries. Its rows are
// then not one piece (heads come before rows), so it has a buffer of its own: gathered
// before, or scattered when the part has ended.
#ifndef RINGATTN_CLIENT_PART_ARGS_H_
#define RINGATTN_CLIENT_PART_ARGS_H_

#include <functional>
#include <memory>

#include "client/api/call.h"
#include "client/call_split.h"
#include "client/transfer/byte_runs.h"

namespace ringattn::client {

// REQUIRES, of all below: the call's buffers have the sizes that its shape and dtype
// give them (call_plan.h), and `part` is of its split: all of it if the call has tensors
// beside those with a name (TensorMap).

BasicForwardArgs<ConstRuns> PartOf(const ForwardArgs& call, const CallPart& part);

struct BackwardPartArgs {
  BasicBackwardArgs<ConstRuns> args;
  std::shared_ptr<float[]> lse;  // what args.lse points to; null if that is the call's own
};
BackwardPartArgs PartOf(const BackwardArgs& call, const CallPart& part);

struct ForwardPartResults {
  BasicForwardResults<MutableRuns> results;
  // To be called once, when the part has succeeded; owns the buffer that results.lse
  // may point to. Empty: nothing is to be done.
  std::function<void()> collect;
};
ForwardPartResults PartOf(const ForwardArgs& call, const ForwardResults& results,
                          const CallPart& part);

BasicBackwardResults<MutableRuns> PartOf(const BackwardArgs& call, const BackwardResults& results,
                                         const CallPart& part);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_PART_ARGS_H_
