#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

// Both sides use the same numbers.
static_assert(static_cast<int>(TensorId::kQ) == v1::TENSOR_ID_Q);
static_assert(static_cast<int>(TensorId::kLse) == v1::TENSOR_ID_LSE);
static_assert(static_cast<int>(TensorId::kDout) == v1::TENSOR_ID_DOUT);
static_assert(static_cast<int>(TensorId::kDv) == v1::TENSOR_ID_DV);
static_assert(static_cast<int>(TensorId::kProbabilities) == v1::TENSOR_ID_PROBABILITIES);
static_assert(static_cast<int>(Packing::kQkv) == v1::PACKING_QKV);
static_assert(static_cast<int>(Packing::kKv) == v1::PACKING_KV);

template <typename Value, typename Proto>
struct Pair {
  Value value;
  Proto proto;
};

constexpr Pair<DType, v1::DataType> kDTypes[] = {{DType::kFloat32, v1::DATA_TYPE_FLOAT32},
                                                 {DType::kBFloat16, v1::DATA_TYPE_BFLOAT16},
                                                 {DType::kFloat16, v1::DATA_TYPE_FLOAT16}};
constexpr Pair<Layout, v1::Layout> kLayouts[] = {
    {Layout::kContiguous, v1::LAYOUT_CONTIGUOUS},
    {Layout::kZigzag, v1::LAYOUT_ZIGZAG},
    {Layout::kStriped, v1::LAYOUT_STRIPED},
    {Layout::kZigzagPerDocument, v1::LAYOUT_ZIGZAG_PER_DOCUMENT}};
constexpr Pair<ScheduleKind, v1::Schedule> kSchedules[] = {
    {ScheduleKind::kSingle, v1::SCHEDULE_SINGLE},
    {ScheduleKind::kRing, v1::SCHEDULE_RING},
    {ScheduleKind::kAllGather, v1::SCHEDULE_ALL_GATHER},
    {ScheduleKind::kPassQ, v1::SCHEDULE_PASS_Q},
    {ScheduleKind::kReplicatedQ, v1::SCHEDULE_REPLICATED_Q},
    {ScheduleKind::kDoubleRing, v1::SCHEDULE_DOUBLE_RING}};

template <typename Value, typename Proto, size_t count>
Proto ProtoOf(const Pair<Value, Proto> (&pairs)[count], Value value) {
  for (const auto& pair : pairs) {
    if (pair.value == value) return pair.proto;
  }
  return Proto{};  // UNSPECIFIED, which corresponds to no value
}

template <typename Value, typename Proto, size_t count>
std::optional<Value> ValueOf(const Pair<Value, Proto> (&pairs)[count], Proto proto) {
  for (const auto& pair : pairs) {
    if (pair.proto == proto) return pair.value;
  }
  return std::nullopt;
}

}  // namespace

// UNSPECIFIED means NONE for a shape without a packing.
v1::Packing ToProto(Packing packing) { return static_cast<v1::Packing>(packing); }
std::optional<Packing> FromProto(v1::Packing packing) {
  switch (packing) {
    case v1::PACKING_UNSPECIFIED:
      return Packing::kNone;
    case v1::PACKING_QKV:
      return Packing::kQkv;
    case v1::PACKING_KV:
      return Packing::kKv;
    default:
      return std::nullopt;
  }
}

v1::DataType ToProto(DType dtype) { return ProtoOf(kDTypes, dtype); }
v1::Layout ToProto(Layout layout) { return ProtoOf(kLayouts, layout); }
v1::Schedule ToProto(ScheduleKind kind) { return ProtoOf(kSchedules, kind); }

std::optional<DType> FromProto(v1::DataType dtype) { return ValueOf(kDTypes, dtype); }
std::optional<Layout> FromProto(v1::Layout layout) { return ValueOf(kLayouts, layout); }
std::optional<ScheduleKind> FromProto(v1::Schedule schedule) {
  return ValueOf(kSchedules, schedule);
}

void ToProto(const AttentionShape& shape, v1::AttentionShape* proto) {
  proto->set_batch(shape.batch);
  proto->set_seq_len_q(shape.seq_len_q);
  proto->set_seq_len_kv(shape.seq_len_kv);
  proto->set_num_heads(shape.num_heads);
  proto->set_num_kv_heads(shape.num_kv_heads);
  proto->set_head_dim(shape.head_dim);
  proto->set_head_dim_v(shape.head_dim_v);
  proto->set_packing(ToProto(shape.packing));
  if (!shape.packed) return;
  v1::PackedDocuments* packed = proto->mutable_packed();
  packed->mutable_cu_seqlens_q()->Add(shape.cu_seqlens_q.begin(), shape.cu_seqlens_q.end());
  packed->mutable_cu_seqlens_k()->Add(shape.cu_seqlens_k.begin(), shape.cu_seqlens_k.end());
  for (const MaskRule& rule : shape.document_rules) {
    v1::DocumentOptions* options = packed->add_options();
    options->set_causal(rule.causal);
    if (rule.window_left < 0 && rule.window_right < 0) continue;
    options->mutable_window()->set_left(rule.window_left);
    options->mutable_window()->set_right(rule.window_right);
  }
}

void ToProto(const Tuning& tuning, v1::Tuning* proto) {
  if (tuning.tile_q != 0) proto->set_tile_q(tuning.tile_q);
  if (tuning.tile_kv != 0) proto->set_tile_kv(tuning.tile_kv);
  if (tuning.key_splits != 0) proto->set_key_splits(tuning.key_splits);
}

Tuning FromProto(const v1::Tuning& proto) {
  return {static_cast<int32_t>(proto.tile_q()), static_cast<int32_t>(proto.tile_kv()),
          static_cast<int32_t>(proto.key_splits())};
}

MaskRule FromProto(const v1::DocumentOptions& options) {
  MaskRule rule;
  rule.causal = options.causal();
  if (!options.has_window()) return rule;
  rule.window_left = options.window().left();
  rule.window_right = options.window().right();
  return rule;
}

AttentionShape FromProto(const v1::AttentionShape& proto) {
  AttentionShape shape;
  shape.packed = proto.has_packed();
  shape.batch = proto.batch();
  shape.seq_len_q = proto.seq_len_q();
  shape.seq_len_kv = proto.seq_len_kv();
  shape.num_heads = proto.num_heads();
  shape.num_kv_heads = proto.num_kv_heads();
  shape.head_dim = proto.head_dim();
  shape.head_dim_v = proto.head_dim_v();
  shape.packing = FromProto(proto.packing()).value_or(Packing::kNone);
  shape.cu_seqlens_q = {0, shape.seq_len_q};
  shape.cu_seqlens_k = {0, shape.seq_len_kv};
  if (shape.packed) {
    const v1::PackedDocuments& packed = proto.packed();
    shape.cu_seqlens_q.assign(packed.cu_seqlens_q().begin(), packed.cu_seqlens_q().end());
    shape.cu_seqlens_k.assign(packed.cu_seqlens_k().begin(), packed.cu_seqlens_k().end());
    for (const v1::DocumentOptions& options : packed.options()) {
      shape.document_rules.push_back(FromProto(options));
    }
  }
  return shape;
}

}  // namespace ringattn
