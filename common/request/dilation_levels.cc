#include "common/request/dilation_levels.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"

namespace ringattn {
namespace {

// Longer segments and larger rates mean the same as this one, which exceeds every sequence. Sums of
// positions with it cannot overflow.
constexpr uint64_t kBeyondAnySequence = uint64_t{1} << 40;

int64_t CheckAtLeastOne(const std::string& field, uint64_t value, Violations& violations) {
  if (value == 0) violations.Invalid(field, "is 0 or not given, must be at least 1");
  return static_cast<int64_t>(std::clamp<uint64_t>(value, 1, kBeyondAnySequence));
}

void CheckHeads(const std::string& field, const v1::DilationLevel& from,
                const AttentionShape& shape, DilationLevel& to, Violations& violations) {
  to.head_begin = from.has_head_begin() ? from.head_begin() : 0;
  to.head_end = from.has_head_end() ? from.head_end() : shape.num_heads;
  if (to.head_end > shape.num_heads) {
    violations.Invalid(field + ".head_end",
                       absl::StrCat("is ", to.head_end, " of ", shape.num_heads, " heads"));
  } else if (to.head_begin >= to.head_end) {
    violations.Invalid(
        field + ".head_begin",
        absl::StrCat("is ", to.head_begin, ", must be below head_end, ", to.head_end));
  } else {
    return;
  }
  to.head_begin = 0;
  to.head_end = std::max<int64_t>(shape.num_heads, 1);
}

DilationLevel ReadLevel(const std::string& field, const v1::DilationLevel& from,
                        const AttentionShape& shape, Violations& violations) {
  DilationLevel level;
  level.segment_length =
      CheckAtLeastOne(field + ".segment_length", from.segment_length(), violations);
  level.dilation_rate = CheckAtLeastOne(field + ".dilation_rate", from.dilation_rate(), violations);
  if (from.has_offset()) {
    if (from.offset() < from.dilation_rate()) {
      level.offset = static_cast<int64_t>(std::min(from.offset(), kBeyondAnySequence - 1));
    } else {
      violations.Invalid(field + ".offset",
                         absl::StrCat("is ", from.offset(), ", must be below dilation_rate, ",
                                      from.dilation_rate()));
    }
  }
  CheckHeads(field, from, shape, level, violations);
  return level;
}

bool SeesEverything(const DilationLevel& level, const AttentionShape& shape) {
  int64_t longest = 0;
  for (size_t d = 1; d < shape.cu_seqlens_q.size(); ++d) {
    longest = std::max(longest, shape.cu_seqlens_q[d] - shape.cu_seqlens_q[d - 1]);
  }
  return level.segment_length >= longest && level.dilation_rate == 1 && level.head_begin == 0 &&
         level.head_end == shape.num_heads;
}

}  // namespace

void ReadDilationLevels(const v1::AttentionOptions& from, const AttentionShape& shape,
                        AttentionOptions& to, Violations& violations) {
  const Limits limits;  // stop reading; CheckDilation rejects the number
  if (from.dilation_levels_size() > limits.max_dilation_levels) {
    violations.OverLimit("options.dilation_levels",
                         absl::StrCat("has ", from.dilation_levels_size(), " levels, the limit is ",
                                      limits.max_dilation_levels));
    return;
  }
  for (int i = 0; i < from.dilation_levels_size(); ++i) {
    to.dilation_levels.push_back(ReadLevel(absl::StrCat("options.dilation_levels[", i, "]"),
                                           from.dilation_levels(i), shape, violations));
  }
  for (int64_t d = 0; d < shape.num_documents() && !to.dilation_levels.empty(); ++d) {
    if (shape.cu_seqlens_q.size() != shape.cu_seqlens_k.size()) break;  // CheckShape rejects it
    const int64_t queries = shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d];
    const int64_t keys = shape.cu_seqlens_k[d + 1] - shape.cu_seqlens_k[d];
    if (queries == keys) continue;
    violations.Invalid(
        "options.dilation_levels",
        absl::StrCat("need as many queries as keys: ",
                     shape.packed ? absl::StrCat("document ", d, " has ") : "here are ", queries,
                     " and ", keys));
    break;
  }
  if (to.dilation_levels.size() == 1 && SeesEverything(to.dilation_levels[0], shape)) {
    to.dilation_levels.clear();
  }
}

void WriteDilationLevels(const AttentionOptions& from, v1::AttentionOptions& to) {
  for (const DilationLevel& level : from.dilation_levels) {
    v1::DilationLevel& added = *to.add_dilation_levels();
    added.set_segment_length(level.segment_length);
    added.set_dilation_rate(level.dilation_rate);
    if (level.offset.has_value()) added.set_offset(*level.offset);
    added.set_head_begin(static_cast<uint32_t>(level.head_begin));
    added.set_head_end(static_cast<uint32_t>(level.head_end));
  }
}

}  // namespace ringattn
