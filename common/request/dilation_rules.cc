#include "common/request/dilation_rules.h"

#include "absl/strings/str_cat.h"
#include "common/layout/dilation.h"

namespace ringattn {
namespace {

// Plans have a program for each level and offset, and a document for each of its segments.
void CheckSizes(const AttentionSpec& spec, const Limits& limits, Violations& violations) {
  const int64_t parts = DilatedPartCount(spec.options);
  if (parts > limits.max_dilated_parts) {
    return violations.OverLimit(
        "options.dilation_levels",
        absl::StrCat("select ", parts, " pairs of a level and an offset, the limit is ",
                     limits.max_dilated_parts,
                     ": use fewer levels, smaller dilation rates or a fixed offset"));
  }
  const int64_t segments = PlannedDocuments(spec);
  if (segments <= limits.max_dilated_segments) return;
  violations.OverLimit(
      "options.dilation_levels",
      absl::StrCat("have ", segments, " segments, counted once for each offset, the limit is ",
                   limits.max_dilated_segments, ": longer segments have fewer"));
}

}  // namespace

void CheckDilation(int64_t heads_per_step, const AttentionSpec& spec, const Limits& limits,
                   Violations& violations) {
  if (spec.options.dilation_levels.empty()) return;
  if (heads_per_step != 0) {
    violations.Invalid("plan.heads_per_step",
                       "is set, but options.dilation_levels assign the heads");
  }
  if (!spec.probability_rows.empty()) {
    violations.Invalid("reply.probability_rows",
                       "are set, but with options.dilation_levels a key may count several times");
  }
  const std::optional<BiasForm>& bias = spec.options.bias;
  if (bias.has_value() && bias->gradient && !bias->float32 && spec.dtype != DType::kFloat32) {
    violations.Invalid("options.bias.gradient",
                       "is the sum over options.dilation_levels, in fp32: options.bias.dtype must "
                       "be fp32");
  }
  if (violations.empty()) CheckSizes(spec, limits, violations);
}

}  // namespace ringattn
