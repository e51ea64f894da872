// Validation at the edge: from a client's header to an AttentionSpec that everything
// behind may trust. The only place that checks what clients write. Pure, and safe for any
// input: no product is formed before its factors are bounded.
#ifndef RINGATTN_COMMON_REQUEST_VALIDATION_H_
#define RINGATTN_COMMON_REQUEST_VALIDATION_H_

#include <google/protobuf/duration.pb.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/base/limits.h"
#include "common/plan/planner.h"
#include "common/request/transport_choice.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

struct ValidRequest {
  AttentionSpec spec;
  Direction direction = Direction::kForward;
  bool recompute_forward = false;
  PlanChoice choice;  // recompute_forward included
  // Forward: how long a residual of it is to be kept; none: it is not.
  std::optional<absl::Duration> retain_ttl;
  // Backward: the residual that it reads; empty: none. `inputs` are then those sent beside it.
  std::string residual_handle;
  bool keep_residual = false;
  std::vector<TensorId> inputs;   // in the order in which they are streamed
  std::vector<TensorId> outputs;  // likewise
  TransportChoice transport = {};
};

std::variant<ValidRequest, Rejection> ValidateRequest(const v1::ForwardHeader& header,
                                                      const Limits& limits);
// One with a residual_handle: once it is complete (residual_header.h).
std::variant<ValidRequest, Rejection> ValidateRequest(const v1::BackwardHeader& header,
                                                      const Limits& limits);

// How long a residual is to be kept, `field` being where it says so; the default unless set.
absl::Duration CheckResidualTtl(const google::protobuf::Duration* ttl, const char* field,
                                const Limits& limits, Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_VALIDATION_H_
