#include "common/request/shape_rules.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/request/enum_values.h"
#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

using CuSeqlens = google::protobuf::RepeatedField<uint64_t>;

// A head dimension above the limit is unsupported rather than too large: no kernel accepts it.
int64_t CheckHeadDim(const char* field, uint64_t value, const Limits& limits,
                     Violations& violations) {
  if (value < 1 || value > static_cast<uint64_t>(limits.max_head_dim)) {
    violations.Invalid(field, absl::StrCat("is ", value, ", must be in 1..", limits.max_head_dim));
    return 1;
  }
  return static_cast<int64_t>(value);
}

std::vector<int64_t> CheckCuSeqlens(const std::string& field, const CuSeqlens& list, uint64_t total,
                                    const char* total_field, const Limits& limits,
                                    Violations& violations) {
  if (list.empty()) {
    violations.Invalid(field, "must have an entry for each document and one for the end");
    return {};
  }
  if (list.size() - 1 > limits.max_documents) {
    violations.OverLimit(field, absl::StrCat("has ", list.size() - 1, " documents, the limit is ",
                                             limits.max_documents));
    return {};
  }
  std::vector<int64_t> result;
  result.reserve(list.size());
  if (list[0] != 0) {
    violations.Invalid(absl::StrCat(field, "[0]"), absl::StrCat("is ", list[0], ", must be 0"));
  }
  for (int i = 0; i < list.size(); ++i) {
    if (i > 0 && list[i] < list[i - 1]) {
      violations.Invalid(absl::StrCat(field, "[", i, "]"),
                         absl::StrCat("is ", list[i], ", less than ", list[i - 1], " before it"));
    }
    result.push_back(static_cast<int64_t>(std::min<uint64_t>(list[i], INT64_MAX)));
  }
  const int last = list.size() - 1;
  if (list[last] != total) {
    violations.Invalid(absl::StrCat(field, "[", last, "]"),
                       absl::StrCat("is ", list[last], ", must be ", total_field, " = ", total));
  }
  return result;
}

std::vector<MaskRule> CheckDocumentRules(const v1::PackedDocuments& packed, int64_t documents,
                                         Violations& violations) {
  std::vector<MaskRule> rules;
  if (packed.options().empty()) return rules;
  if (packed.options_size() != documents) {
    violations.Invalid("shape.packed.options",
                       absl::StrCat("has ", packed.options_size(), " entries for ", documents,
                                    " documents: none, or one for each"));
    return rules;
  }
  rules.reserve(documents);
  for (int d = 0; d < packed.options_size(); ++d) {
    const MaskRule& rule = rules.emplace_back(FromProto(packed.options(d)));
    const auto check = [&](const char* side, int64_t value) {
      if (value >= -1) return;
      violations.Invalid(absl::StrCat("shape.packed.options[", d, "].window.", side),
                         absl::StrCat("is ", value, ", must be at least -1"));
    };
    check("left", rule.window_left);
    check("right", rule.window_right);
  }
  return rules;
}

void CheckDocuments(const v1::AttentionShape& proto, const Limits& limits, AttentionShape& shape,
                    Violations& violations) {
  if (!proto.has_packed()) {
    shape.cu_seqlens_q = {0, shape.seq_len_q};
    shape.cu_seqlens_k = {0, shape.seq_len_kv};
    return;
  }
  if (proto.batch() != 1) {
    violations.Invalid("shape.batch",
                       absl::StrCat("is ", proto.batch(), ", must be 1 when packed"));
  }
  const v1::PackedDocuments& packed = proto.packed();
  shape.cu_seqlens_q = CheckCuSeqlens("shape.packed.cu_seqlens_q", packed.cu_seqlens_q(),
                                      proto.seq_len_q(), "shape.seq_len_q", limits, violations);
  shape.cu_seqlens_k = CheckCuSeqlens("shape.packed.cu_seqlens_k", packed.cu_seqlens_k(),
                                      proto.seq_len_kv(), "shape.seq_len_kv", limits, violations);
  if (packed.cu_seqlens_q_size() != packed.cu_seqlens_k_size()) {
    violations.Invalid("shape.packed.cu_seqlens_k",
                       absl::StrCat("has ", packed.cu_seqlens_k_size(), " entries, cu_seqlens_q ",
                                    packed.cu_seqlens_q_size()));
  }
  shape.document_rules = CheckDocumentRules(packed, shape.num_documents(), violations);
}

int64_t CheckKvHeads(const v1::AttentionShape& proto, int64_t num_heads, const Limits& limits,
                     Violations& violations) {
  if (proto.num_kv_heads() == 0) return num_heads;
  const int64_t kv_heads =
      violations.Bounded("shape.num_kv_heads", proto.num_kv_heads(), 1, limits.max_heads);
  if (proto.num_heads() % proto.num_kv_heads() != 0) {
    violations.Invalid("shape.num_kv_heads",
                       absl::StrCat("is ", proto.num_kv_heads(),
                                    ", must divide shape.num_heads = ", proto.num_heads()));
  }
  return kv_heads;
}

// Tensors that are packed in one have equal lengths, head numbers and dimensions.
void CheckPacking(const v1::AttentionShape& proto, AttentionShape& shape, Violations& violations) {
  const std::optional<Packing> packing = FromProto(proto.packing());
  if (!packing.has_value()) {
    violations.Invalid("shape.packing", OtherThan<v1::Packing>(proto.packing()));
    return;
  }
  shape.packing = *packing;
  if (*packing == Packing::kNone) return;
  const char* tensor = *packing == Packing::kQkv ? "qkv" : "kv";
  const auto check = [&](const char* field, int64_t value, const char* other, int64_t needed) {
    if (value == needed) return;
    violations.Invalid(field, absl::StrCat("is ", value, ", must be ", other, " = ", needed,
                                           " in a packed ", tensor));
  };
  check("shape.head_dim_v", shape.head_dim_v, "shape.head_dim", shape.head_dim);
  if (*packing == Packing::kKv) return;
  check("shape.num_kv_heads", shape.num_kv_heads, "shape.num_heads", shape.num_heads);
  check("shape.seq_len_kv", shape.seq_len_kv, "shape.seq_len_q", shape.seq_len_q);
  if (shape.seq_len_kv == shape.seq_len_q && shape.cu_seqlens_q != shape.cu_seqlens_k) {
    violations.Invalid("shape.packed.cu_seqlens_k",
                       "must be shape.packed.cu_seqlens_q in a packed qkv");
  }
}

}  // namespace

AttentionShape CheckShape(const v1::AttentionShape& proto, const Limits& limits,
                          Violations& violations) {
  AttentionShape shape;
  shape.packed = proto.has_packed();
  shape.batch = violations.Bounded("shape.batch", proto.batch(), 0, limits.max_batch);
  shape.seq_len_q = violations.Bounded("shape.seq_len_q", proto.seq_len_q(), 0, limits.max_tokens);
  shape.seq_len_kv =
      violations.Bounded("shape.seq_len_kv", proto.seq_len_kv(), 0, limits.max_tokens);
  shape.num_heads = violations.Bounded("shape.num_heads", proto.num_heads(), 1, limits.max_heads);
  shape.num_kv_heads = CheckKvHeads(proto, shape.num_heads, limits, violations);
  shape.head_dim = CheckHeadDim("shape.head_dim", proto.head_dim(), limits, violations);
  shape.head_dim_v = proto.head_dim_v() == 0
                         ? shape.head_dim
                         : CheckHeadDim("shape.head_dim_v", proto.head_dim_v(), limits, violations);
  CheckDocuments(proto, limits, shape, violations);
  CheckPacking(proto, shape, violations);
  return shape;
}

}  // namespace ringattn
