#include "common/request/request_rules.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/request/compute_dtype_rules.h"
#include "common/request/dilation_rules.h"
#include "common/request/enum_values.h"
#include "common/request/option_fields.h"
#include "common/request/shape_rules.h"
#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

DType ReadDType(v1::DataType proto, Violations& violations) {
  const std::optional<DType> dtype = FromProto(proto);
  if (dtype.has_value()) return *dtype;
  violations.Invalid("dtype", OtherThan(proto, *v1::DataType_descriptor(), [](int number) {
                       return FromProto(static_cast<v1::DataType>(number)).has_value();
                     }));
  return DType::kFloat32;
}

// Rejects a header that sets the request's mask in two places.
void CheckOneRule(const SpecFields& fields, Violations& violations) {
  if (fields.shape.packed().options().empty()) return;
  const auto refuse = [&](const char* field) {
    violations.Invalid(field, "is set, but shape.packed.options sets the mask of each document");
  };
  if (fields.options.causal()) refuse("options.causal");
  if (fields.options.has_window()) refuse("options.window");
}

// Checks that a bias has the request's dtype or fp32.
void CheckBiasDType(const SpecFields& fields, Violations& violations) {
  const v1::Bias& bias = fields.options.bias();
  if (!bias.has_dtype() || bias.dtype() == v1::DATA_TYPE_FLOAT32 || bias.dtype() == fields.dtype) {
    return;
  }
  violations.Invalid("options.bias.dtype", "must be the request's dtype or fp32");
}

// REQUIRES: the shape is valid, or `violations` says why it is not.
std::vector<ProbabilityRow> CheckProbabilityRows(const SpecFields& fields,
                                                 const AttentionShape& shape, const Limits& limits,
                                                 Violations& violations) {
  std::vector<ProbabilityRow> rows;
  if (fields.probability_rows.empty() || !violations.empty()) return rows;
  const std::string list = "reply.probability_rows";
  if (fields.probability_rows.size() > limits.max_probability_rows) {
    violations.OverLimit(list, absl::StrCat("has ", fields.probability_rows.size(),
                                            " rows, the limit is ", limits.max_probability_rows));
    return rows;
  }
  const int64_t batches = shape.packed ? shape.num_documents() : shape.batch;
  rows.reserve(fields.probability_rows.size());
  for (int i = 0; i < fields.probability_rows.size(); ++i) {
    const v1::ProbabilityRow& row = fields.probability_rows[i];
    const std::string field = absl::StrCat(list, "[", i, "]");
    if (row.batch() >= static_cast<uint64_t>(batches)) {
      violations.Invalid(field + ".batch",
                         absl::StrCat("is ", row.batch(), " of ", batches,
                                      shape.packed ? " documents" : " batch rows"));
      continue;
    }
    const auto batch = static_cast<int64_t>(row.batch());
    const int64_t queries =
        shape.packed ? shape.cu_seqlens_q[batch + 1] - shape.cu_seqlens_q[batch] : shape.seq_len_q;
    if (row.position() >= static_cast<uint64_t>(queries)) {
      violations.Invalid(field + ".position",
                         absl::StrCat("is ", row.position(), " of ", queries, " queries"));
      continue;
    }
    rows.push_back({batch, static_cast<int64_t>(row.position())});
  }
  return rows;
}

// Rejects fields that belong to the other direction. The edge's headers cannot contain most of
// them.
void CheckDirection(const ProgramTerms& terms, Violations& violations) {
  if (terms.direction == Direction::kForward) {
    if (terms.recompute_forward)
      violations.Invalid("recompute_forward", "applies to Backward only");
    if (terms.reads_residual) violations.Invalid("residual", "applies to Backward only");
    return;
  }
  if (terms.retains) violations.Invalid("retain", "applies to Forward only");
  if (terms.reads_residual && terms.recompute_forward) {
    violations.Invalid("recompute_forward", "is set, but the residual has out and lse");
  }
}

// Checks the terms on their own.
void CheckTerms(const ProgramTerms& terms, Violations& violations) {
  if (terms.schedule == ScheduleKind::kSingle && terms.world_size.value_or(1) > 1) {
    violations.Invalid("plan.world_size",
                       absl::StrCat("is ", *terms.world_size, ", but plan.schedule is single"));
  }
  if (terms.heads_per_step != 0 && terms.schedule != ScheduleKind::kAllGather) {
    violations.Invalid("plan.heads_per_step", "is set, but plan.schedule is not all_gather");
  }
  if (terms.group_size != 0 && terms.schedule != ScheduleKind::kDoubleRing) {
    violations.Invalid("plan.group_size", "is set, but plan.schedule is not double_ring");
  } else if (terms.group_size != 0 && terms.world_size.has_value() &&
             *terms.world_size % terms.group_size != 0) {
    violations.Invalid(
        "plan.group_size",
        absl::StrCat("is ", terms.group_size, ": must divide the ring size, ", *terms.world_size));
  }
  if (terms.stripe != 0 && terms.layout != Layout::kStriped) {
    violations.Invalid("plan.stripe", "is set, but plan.layout is not striped");
  }
}

// Rejects options that the schedule does not support.
void CheckSchedule(const ProgramTerms& terms, const AttentionSpec& spec, Violations& violations) {
  const AttentionOptions& options = spec.options;
  if (terms.schedule.has_value() && KeepsKeysInPlace(*terms.schedule)) {
    if (!spec.probability_rows.empty()) {
      violations.Invalid(
          "reply.probability_rows",
          absl::StrCat("are set, but plan.schedule is ", ScheduleKindName(*terms.schedule),
                       ": use ring, all_gather or single"));
    }
  }
  const bool by_keys =
      terms.schedule.has_value() && PairAxisOf(*terms.schedule, options) == Axis::kKv;
  const char* const refused = by_keys ? UnshardableByKeys(spec) : nullptr;
  if (refused != nullptr) {
    violations.Invalid("plan.schedule", absl::StrCat("is ", ScheduleKindName(*terms.schedule),
                                                     ", which does not support a ", refused,
                                                     ": use ring, all_gather or single"));
  }
  if (terms.heads_per_step == 0) return;
  if (!spec.probability_rows.empty()) {
    violations.Invalid("plan.heads_per_step",
                       "is set, but does not support reply.probability_rows");
  }
  if (spec.shape.num_kv_heads % terms.heads_per_step != 0) {
    violations.Invalid("plan.heads_per_step",
                       absl::StrCat("is ", terms.heads_per_step, ": must divide num_kv_heads, ",
                                    spec.shape.num_kv_heads));
  }
  if (options.bias.has_value() && options.bias->gradient && !options.bias->per_head &&
      terms.heads_per_step != spec.shape.num_kv_heads) {
    violations.Invalid(
        "plan.heads_per_step",
        "is set, but the gradient of a bias that heads share needs all heads at once");
  }
}

}  // namespace

AttentionSpec ReadSpec(const SpecFields& fields, const Limits& limits, Violations& violations) {
  AttentionSpec spec;
  spec.dtype = ReadDType(fields.dtype, violations);
  spec.shape = CheckShape(fields.shape, limits, violations);
  spec.options = ReadOptions(fields.options, spec.shape, violations);
  CheckOneRule(fields, violations);
  CheckBiasDType(fields, violations);
  spec.has_dlse = fields.has_dlse;
  if (fields.has_dlse && fields.direction == Direction::kForward) {
    violations.Invalid("has_dlse", "applies to Backward only");
  }
  if (fields.lse_per_document && !spec.shape.packed) {
    violations.Invalid("reply.lse_format", "is per document, but shape.packed is not set");
  }
  spec.lse_per_document = fields.lse_per_document && spec.shape.packed;
  if (!fields.probability_rows.empty() && fields.direction == Direction::kBackward) {
    violations.Invalid(kProbabilityRowsField, "apply to Forward only");
  }
  spec.probability_rows = CheckProbabilityRows(fields, spec.shape, limits, violations);
  return spec;
}

int64_t ReadStripe(uint64_t stripe, const Limits& limits, Violations& violations) {
  return violations.Bounded("plan.stripe", stripe, 1, limits.max_tokens);
}

void CheckProgram(const ProgramTerms& terms, const AttentionSpec& spec, const Limits& limits,
                  Violations& violations) {
  CheckDirection(terms, violations);
  CheckTerms(terms, violations);
  CheckSchedule(terms, spec, violations);
  CheckDilation(terms.heads_per_step, spec, limits, violations);
  CheckComputeDType(spec, terms.direction, terms.retains, violations);
}

std::vector<TensorId> ClientInputsOf(const AttentionSpec& spec, const ProgramTerms& terms) {
  std::vector<TensorId> inputs = InputsOf(spec, terms.direction, terms.recompute_forward);
  if (terms.reads_residual) {
    inputs.erase(std::remove_if(inputs.begin(), inputs.end(),
                                [](TensorId id) { return !IsSentBesideResidual(id); }),
                 inputs.end());
  }
  return inputs;
}

void CheckTensorSizes(const AttentionSpec& spec, Direction direction,
                      const std::vector<TensorId>& inputs, const Limits& limits,
                      Violations& violations) {
  int64_t total = 0;
  const auto add = [&](TensorId id) {
    const int64_t bytes = BytesOf(spec, id);
    total += std::min(bytes, limits.max_request_bytes);
    if (bytes <= limits.max_tensor_bytes) return;
    violations.OverLimit(
        "shape", absl::StrCat(TensorName(id), " takes ", bytes < kSaturatedBytes ? "" : "at least ",
                              bytes, " bytes, the limit is ", limits.max_tensor_bytes));
  };
  for (TensorId id : inputs) add(id);
  for (TensorId id : OutputsOf(spec, direction)) add(id);
  if (total > limits.max_request_bytes) {
    violations.OverLimit("shape", absl::StrCat("inputs and outputs take more than ",
                                               limits.max_request_bytes, " bytes"));
  }
}

}  // namespace ringattn
