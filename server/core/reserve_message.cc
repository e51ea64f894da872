#include "server/core/reserve_message.h"

namespace ringattn {
namespace {

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

v1::Layout ToProto(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return v1::LAYOUT_CONTIGUOUS;
    case Layout::kZigzag:
      return v1::LAYOUT_ZIGZAG;
    case Layout::kStriped:
      return v1::LAYOUT_STRIPED;
  }
  return v1::LAYOUT_UNSPECIFIED;
}

v1::Schedule ToProto(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kSingle:
      return v1::SCHEDULE_SINGLE;
    case ScheduleKind::kRing:
      return v1::SCHEDULE_RING;
  }
  return v1::SCHEDULE_UNSPECIFIED;
}

void ToProto(const AttentionShape& shape, v1::AttentionShape* proto) {
  proto->set_batch(shape.batch);
  proto->set_seq_len_q(shape.seq_len_q);
  proto->set_seq_len_kv(shape.seq_len_kv);
  proto->set_num_heads(shape.num_heads);
  proto->set_num_kv_heads(shape.num_kv_heads);
  proto->set_head_dim(shape.head_dim);
  proto->set_head_dim_v(shape.head_dim_v);
  if (!shape.packed) return;
  v1::PackedDocuments* packed = proto->mutable_packed();
  packed->mutable_cu_seqlens_q()->Add(shape.cu_seqlens_q.begin(), shape.cu_seqlens_q.end());
  packed->mutable_cu_seqlens_k()->Add(shape.cu_seqlens_k.begin(), shape.cu_seqlens_k.end());
}

void ToProto(const AttentionOptions& options, v1::AttentionOptions* proto) {
  proto->set_softmax_scale(options.softmax_scale);
  if (options.softcap != 0) proto->set_softcap(options.softcap);
  proto->set_causal(options.causal);
  if (options.window_left < 0 && options.window_right < 0) return;
  proto->mutable_window()->set_left(options.window_left);
  proto->mutable_window()->set_right(options.window_right);
}

}  // namespace

v1::Reserve MakeReserve(const RequestArrived& request, const Plan& plan,
                        const std::string& operation_id, uint64_t generation,
                        const std::vector<uint32_t>& members) {
  v1::Reserve reserve;
  reserve.set_operation_id(operation_id);
  reserve.set_generation(generation);
  reserve.mutable_members()->Add(members.begin(), members.end());
  reserve.set_backward(request.direction == Direction::kBackward);
  reserve.set_recompute_forward(request.recompute_forward);
  ToProto(request.spec.shape, reserve.mutable_shape());
  reserve.set_dtype(ToProto(request.spec.dtype));
  ToProto(request.spec.options, reserve.mutable_options());
  reserve.set_layout(ToProto(plan.shards.layout));
  reserve.set_schedule(ToProto(plan.schedule));
  reserve.set_stripe(plan.shards.stripe);
  reserve.set_with_timeline(request.with_timeline);
  return reserve;
}

}  // namespace ringattn
