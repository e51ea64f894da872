#include "worker/service/reserve_decoder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// No tensor of a request reaches this size (2^48 bytes), so that the products
// below and in the schedule stay far from overflow.
constexpr uint64_t kMaxTensorBytes = uint64_t{1} << 48;
constexpr uint32_t kMaxHeadDim = 256;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed Reserve: ", what));
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

absl::StatusOr<DType> DecodeDType(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    case v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    default:
      return Malformed("dtype");
  }
}

absl::StatusOr<Layout> DecodeLayout(v1::Layout layout) {
  switch (layout) {
    case v1::LAYOUT_CONTIGUOUS:
      return Layout::kContiguous;
    case v1::LAYOUT_ZIGZAG:
      return Layout::kZigzag;
    case v1::LAYOUT_STRIPED:
      return Layout::kStriped;
    default:
      return Malformed("layout");
  }
}

template <typename Repeated>
absl::Status DecodeDocuments(const Repeated& values, int64_t total, std::vector<int64_t>* target) {
  target->assign(values.begin(), values.end());
  if (target->size() < 2 || target->front() != 0 || target->back() != total ||
      !std::is_sorted(target->begin(), target->end())) {
    return Malformed("cu_seqlens");
  }
  return absl::OkStatus();
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
    return Malformed("shape too large");
  }
  AttentionShape shape;
  shape.packed = proto.has_packed();
  shape.batch = proto.batch();
  shape.seq_len_q = proto.seq_len_q();
  shape.seq_len_kv = proto.seq_len_kv();
  shape.num_heads = proto.num_heads();
  shape.num_kv_heads = proto.num_kv_heads();
  shape.head_dim = proto.head_dim();
  shape.head_dim_v = proto.head_dim_v();
  if (!shape.packed) {
    shape.cu_seqlens_q = {0, shape.seq_len_q};
    shape.cu_seqlens_k = {0, shape.seq_len_kv};
    return shape;
  }
  if (shape.batch != 1 ||
      proto.packed().cu_seqlens_q_size() != proto.packed().cu_seqlens_k_size()) {
    return Malformed("packed shape");
  }
  absl::Status status =
      DecodeDocuments(proto.packed().cu_seqlens_q(), shape.seq_len_q, &shape.cu_seqlens_q);
  status.Update(
      DecodeDocuments(proto.packed().cu_seqlens_k(), shape.seq_len_kv, &shape.cu_seqlens_k));
  if (!status.ok()) return status;
  return shape;
}

AttentionOptions DecodeOptions(const v1::AttentionOptions& proto) {
  AttentionOptions options;
  options.softmax_scale = proto.softmax_scale();
  options.softcap = proto.softcap();
  options.causal = proto.causal();
  if (proto.has_window()) {
    options.window_left = proto.window().left();
    options.window_right = proto.window().right();
  }
  return options;
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
  if (ring_rank < 0) return Malformed("this worker is not among the members");

  absl::StatusOr<DType> dtype = DecodeDType(reserve.dtype());
  if (!dtype.ok()) return dtype.status();
  absl::StatusOr<AttentionShape> shape = DecodeShape(reserve.shape());
  if (!shape.ok()) return shape.status();
  absl::StatusOr<Layout> layout = DecodeLayout(reserve.layout());
  if (!layout.ok()) return layout.status();
  result.spec = {*dtype, *std::move(shape), DecodeOptions(reserve.options())};

  const int ring_size = result.members.size();
  if (reserve.schedule() == v1::SCHEDULE_SINGLE && ring_size != 1) return Malformed("schedule");
  const int64_t stripe = reserve.stripe() == 0 ? 1 : static_cast<int64_t>(reserve.stripe());
  if (stripe < 1) return Malformed("stripe");
  result.plan = MakeShardPlan(result.spec, *layout, ring_size, stripe);
  Schedule schedule =
      MakeSchedule(result.spec, result.plan,
                   reserve.backward() ? Direction::kBackward : Direction::kForward,
                   reserve.recompute_forward());
  result.program = std::move(schedule.programs[ring_rank]);
  return result;
}

}  // namespace ringattn
