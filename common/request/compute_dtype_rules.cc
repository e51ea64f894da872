#include "common/request/compute_dtype_rules.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/request/option_fields.h"

namespace ringattn {
namespace {

constexpr char kField[] = "options.compute_dtype";

void CheckHeadDim(const char* field, int64_t dim, Violations& violations) {
  if (dim <= kMaxFloat8HeadDim && dim % 8 == 0) return;
  violations.Invalid(field, absl::StrCat("is ", dim, ": with ", kField,
                                         " a multiple of 8, at most ", kMaxFloat8HeadDim));
}

}  // namespace

void CheckComputeDType(const AttentionSpec& spec, Direction direction, bool retains,
                       Violations& violations) {
  const AttentionOptions& options = spec.options;
  if (options.compute_dtype == ComputeDType::kAsInputs) return;
  if (direction == Direction::kBackward) {
    return violations.Invalid(
        kField,
        "is supported in Forward only: gradients are those of the given inputs, not "
        "of rounded ones");
  }
  if (spec.dtype == DType::kFloat32) {
    violations.Invalid(kField, "is an 8-bit type: dtype must be bf16 or fp16");
  }
  CheckHeadDim("shape.head_dim", spec.shape.head_dim, violations);
  CheckHeadDim("shape.head_dim_v", spec.shape.head_dim_v, violations);
  const auto refuse = [&](const std::string& field) {
    violations.Invalid(field, absl::StrCat("is set, but ", kField, " does not support it"));
  };
  if (options.dropout.threshold != 0) refuse("options.dropout");
  if (!options.alibi_slopes.empty()) refuse("options.alibi");
  if (options.bias.has_value()) refuse("options.bias");
  if (options.mask.has_value()) refuse("options.mask");
  if (options.segment_ids) refuse("options.segment_ids");
  if (!spec.probability_rows.empty()) refuse(kProbabilityRowsField);
  if (retains) refuse("retain");
}

}  // namespace ringattn
