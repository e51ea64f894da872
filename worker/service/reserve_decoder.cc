#include "worker/service/reserve_decoder.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/request/option_fields.h"
#include "common/wire/proto_values.h"

namespace ringattn::worker {
namespace {

// No tensor of a request reaches this size (2^48 bytes), so that the products
// below and in the schedule stay far from overflow.
constexpr uint64_t kMaxTensorBytes = uint64_t{1} << 48;
constexpr uint32_t kMaxHeadDim = 256;

// `field`: of Reserve.
absl::Status Malformed(absl::string_view field, absl::string_view what = "makes no sense") {
  return absl::InvalidArgumentError(absl::StrCat("malformed Reserve: ", field, ": ", what));
}

bool ProductExceeds(std::initializer_list<uint64_t> factors, uint64_t bound) {
  uint64_t product = 1;
  for (uint64_t factor : factors) {
    if (factor == 0) return false;
    if (product > bound / factor) return true;
    product *= factor;
  }
  return false;
}

bool AreDocumentsOf(const std::vector<int64_t>& cu_seqlens, int64_t total) {
  return cu_seqlens.size() >= 2 && cu_seqlens.front() == 0 && cu_seqlens.back() == total &&
         std::is_sorted(cu_seqlens.begin(), cu_seqlens.end());
}

// What packed tensors have in common (CheckPacking at the edge says which).
bool PackingFits(const AttentionShape& shape) {
  switch (shape.packing) {
    case Packing::kNone:
      return true;
    case Packing::kQkv:
      return shape.seq_len_q == shape.seq_len_kv && shape.num_heads == shape.num_kv_heads &&
             shape.head_dim == shape.head_dim_v && shape.cu_seqlens_q == shape.cu_seqlens_k;
    case Packing::kKv:
      return shape.head_dim == shape.head_dim_v;
  }
  return false;
}

absl::StatusOr<AttentionShape> DecodeShape(const v1::AttentionShape& proto) {
  if (proto.batch() < 1 || proto.num_heads() < 1 || proto.num_kv_heads() < 1 ||
      proto.num_heads() % proto.num_kv_heads() != 0 || proto.head_dim() < 1 ||
      proto.head_dim() > kMaxHeadDim || proto.head_dim_v() < 1 ||
      proto.head_dim_v() > kMaxHeadDim) {
    return Malformed("shape");
  }
  const uint64_t rows = std::max<uint64_t>({proto.seq_len_q(), proto.seq_len_kv(), 1});
  if (ProductExceeds({proto.batch(), rows, proto.num_heads(), kMaxHeadDim, 4}, kMaxTensorBytes)) {
    return Malformed("shape", "too large");
  }
  AttentionShape shape = FromProto(proto);
  if (!PackingFits(shape)) return Malformed("shape.packing", "does not fit the shape");
  if (!shape.packed) return shape;
  if (shape.batch != 1 || shape.cu_seqlens_q.size() != shape.cu_seqlens_k.size()) {
    return Malformed("shape.packed", "needs batch 1 and as many boundaries of each kind");
  }
  if (!AreDocumentsOf(shape.cu_seqlens_q, shape.seq_len_q) ||
      !AreDocumentsOf(shape.cu_seqlens_k, shape.seq_len_kv)) {
    return Malformed("shape.packed", "the boundaries are not of documents");
  }
  const auto rules = static_cast<int64_t>(shape.document_rules.size());
  if (rules != 0 && rules != shape.num_documents())
    return Malformed("shape.packed.options", "are not one for each document");
  return shape;
}

}  // namespace

absl::StatusOr<ReservedProgram> DecodeReserve(const v1::Reserve& reserve, int rank,
                                              int world_size) {
  ReservedProgram result;
  int ring_rank = -1;
  for (uint32_t member : reserve.members()) {
    const std::vector<int>& known = result.members;
    if (member >= static_cast<uint32_t>(world_size) ||
        std::find(known.begin(), known.end(), static_cast<int>(member)) != known.end()) {
      return Malformed("members");
    }
    if (static_cast<int>(member) == rank) ring_rank = result.members.size();
    result.members.push_back(member);
  }
  if (ring_rank < 0) return Malformed("members", "this worker is not among them");

  const std::optional<DType> dtype = FromProto(reserve.dtype());
  if (!dtype) return Malformed("dtype");
  absl::StatusOr<AttentionShape> shape = DecodeShape(reserve.shape());
  if (!shape.ok()) return shape.status();
  const std::optional<Layout> layout = FromProto(reserve.layout());
  if (!layout) return Malformed("layout");
  Violations violations(/*max_bytes=*/1024);
  const AttentionOptions options = ReadOptions(reserve.options(), *shape, violations);
  if (!violations.empty())
    return Malformed("options", std::move(violations).ToRejection().ToStatus().message());
  if (reserve.has_dlse() && !reserve.backward()) return Malformed("has_dlse", "of a forward");
  if (reserve.lse_per_document() && !shape->packed)
    return Malformed("lse_per_document", "without documents");
  result.spec = {*dtype, *std::move(shape), options, reserve.has_dlse(), reserve.fp32_results()};
  result.spec.lse_per_document = reserve.lse_per_document();

  if (!reserve.probability_rows().empty() && reserve.backward()) {
    return Malformed("probability_rows");
  }
  for (const v1::ProbabilityRow& row : reserve.probability_rows()) {
    const AttentionShape& of = result.spec.shape;
    const uint64_t rows = of.packed ? of.num_documents() : of.batch;
    if (row.batch() >= rows) return Malformed("probability_rows");
    const uint64_t queries =
        of.packed ? of.cu_seqlens_q[row.batch() + 1] - of.cu_seqlens_q[row.batch()] : of.seq_len_q;
    if (row.position() >= queries) return Malformed("probability_rows");
    result.spec.probability_rows.push_back(
        {static_cast<int64_t>(row.batch()), static_cast<int64_t>(row.position())});
  }

  const int ring_size = result.members.size();
  const std::optional<ScheduleKind> kind = FromProto(reserve.schedule());
  if (!kind || (*kind == ScheduleKind::kSingle && ring_size != 1)) return Malformed("schedule");
  result.spec.pairs_by_keys = CutsPairsByKeys(*kind, options);
  const char* const refused = result.spec.pairs_by_keys ? NotCutByKeys(result.spec) : nullptr;
  if (refused != nullptr) return Malformed("schedule", absl::StrCat("serves no ", refused));
  if (!result.spec.probability_rows.empty() &&
      (KeepsKeysInPlace(*kind) || reserve.heads_per_step() != 0)) {
    return Malformed("schedule", "serves no probability_rows");
  }
  const int64_t heads_per_step = reserve.heads_per_step();
  // All heads in one step are no groups, whose sum dbias would be.
  const bool shares_dbias = options.bias.has_value() && options.bias->gradient &&
                            !options.bias->per_head &&
                            heads_per_step != result.spec.shape.num_kv_heads;
  if (heads_per_step != 0 && (*kind != ScheduleKind::kAllGather || shares_dbias ||
                              result.spec.shape.num_kv_heads % heads_per_step != 0)) {
    return Malformed("heads_per_step");
  }
  const int64_t stripe = reserve.stripe() == 0 ? 1 : static_cast<int64_t>(reserve.stripe());
  if (stripe < 1) return Malformed("stripe");
  result.plan = MakeShardPlan(result.spec, *layout, ring_size, stripe);
  if (reserve.recompute_forward() && !reserve.backward())
    return Malformed("recompute_forward", "of a forward");
  if (reserve.retain() && reserve.backward()) return Malformed("retain", "of a backward");
  const bool reads_residual = !reserve.residual().empty();
  if (reads_residual && (!reserve.backward() || reserve.recompute_forward())) {
    return Malformed("residual");
  }
  result.program =
      MakeProgram(result.spec, result.plan, *kind,
                  reserve.backward() ? Direction::kBackward : Direction::kForward,
                  reserve.recompute_forward(), ring_rank, reserve.retain(), heads_per_step);
  result.program.tuning = FromProto(reserve.tuning());
  return result;
}

}  // namespace ringattn::worker
