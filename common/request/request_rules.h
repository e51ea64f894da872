// The rules that every request must satisfy, whether it is read from a client's header at the edge
// or from a Reserve at a worker. Both call these functions, so a worker accepts exactly the specs
// and programs that the edge accepts. Fields in violations are those of the header.
//
// Pure, and safe for any input; thread safe.
#ifndef RINGATTN_COMMON_REQUEST_REQUEST_RULES_H_
#define RINGATTN_COMMON_REQUEST_REQUEST_RULES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/base/limits.h"
#include "common/plan/planner.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

// The fields that define what is computed. All references must outlive the call.
struct SpecFields {
  Direction direction = Direction::kForward;
  const v1::AttentionShape& shape;
  v1::DataType dtype;
  const v1::AttentionOptions& options;
  const google::protobuf::RepeatedPtrField<v1::ProbabilityRow>& probability_rows;
  bool lse_per_document = false;
  bool has_dlse = false;
};

// Reads a spec and resolves defaults. Appends violations and replaces invalid values by valid ones,
// so that later checks stay bounded. Leaves fp32_results false.
AttentionSpec ReadSpec(const SpecFields& fields, const Limits& limits, Violations& violations);

// How a spec is computed. Unset values are chosen by the planner.
struct ProgramTerms {
  Direction direction = Direction::kForward;
  bool recompute_forward = false;
  bool retains = false;  // keeps a residual
  bool reads_residual = false;
  std::optional<Layout> layout;
  std::optional<ScheduleKind> schedule;
  std::optional<int> world_size;
  int64_t stripe = 0;          // 0: not set
  int64_t heads_per_step = 0;  // 0: not set
  int64_t group_size = 0;      // 0: not set
};

// Reads a stripe; returns a valid one after a violation.
int64_t ReadStripe(uint64_t stripe, const Limits& limits, Violations& violations);

// Checks that the program can be computed and supports the spec.
// REQUIRES: the spec is valid, or `violations` says why it is not.
void CheckProgram(const ProgramTerms& terms, const AttentionSpec& spec, const Limits& limits,
                  Violations& violations);

// Returns the inputs that the client sends, in streaming order.
std::vector<TensorId> ClientInputsOf(const AttentionSpec& spec, const ProgramTerms& terms);

// Checks the sizes of these inputs and of the outputs. REQUIRES: the spec is valid.
void CheckTensorSizes(const AttentionSpec& spec, Direction direction,
                      const std::vector<TensorId>& inputs, const Limits& limits,
                      Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_REQUEST_RULES_H_
