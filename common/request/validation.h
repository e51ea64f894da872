// Validation at the edge: turns a client's header into an AttentionSpec that all later code relies
// on. Client input is checked only here. Pure, and safe for any input: every product is formed
// after its factors are bounded.
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
  PlanChoice choice;  // includes recompute_forward
  // Forward: how long to keep a residual; nullopt: no residual is kept.
  std::optional<absl::Duration> retain_ttl;
  // Backward: handle of the residual that it reads; empty: none. `inputs` then has only the tensors
  // that the client still sends.
  std::string residual_handle;
  bool keep_residual = false;
  // The request is only prepared, and kept for this long. It then has no inputs and no outputs.
  std::optional<absl::Duration> prepare_ttl;
  std::vector<TensorId> inputs;   // in streaming order
  std::vector<TensorId> outputs;  // in streaming order
  TransportChoice transport = {};
};

std::variant<ValidRequest, Rejection> ValidateRequest(const v1::ForwardHeader& header,
                                                      const Limits& limits);
// A header with a residual_handle must be completed first (residual_header.h).
std::variant<ValidRequest, Rejection> ValidateRequest(const v1::BackwardHeader& header,
                                                      const Limits& limits);

// Reads how long a residual is kept from `ttl`, or the default if it is null. `field` is its name
// in violations.
absl::Duration CheckResidualTtl(const google::protobuf::Duration* ttl, const char* field,
                                const Limits& limits, Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_VALIDATION_H_
