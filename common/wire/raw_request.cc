#include "common/wire/raw_request.h"

#include "common/wire/proto_values.h"

namespace ringattn {

void ReadShape(const v1::AttentionShape& shape, RawRequest* raw) {
  raw->batch = shape.batch();
  raw->seq_len_q = shape.seq_len_q();
  raw->seq_len_kv = shape.seq_len_kv();
  raw->num_heads = shape.num_heads();
  raw->num_kv_heads = shape.num_kv_heads();
  raw->head_dim = shape.head_dim();
  raw->head_dim_v = shape.head_dim_v();
  raw->packed = shape.has_packed();
  const v1::PackedDocuments& packed = shape.packed();
  raw->cu_seqlens_q.assign(packed.cu_seqlens_q().begin(), packed.cu_seqlens_q().end());
  raw->cu_seqlens_k.assign(packed.cu_seqlens_k().begin(), packed.cu_seqlens_k().end());
}

void ReadOptions(const v1::AttentionOptions& options, RawRequest* raw) {
  if (options.has_softmax_scale()) raw->softmax_scale = options.softmax_scale();
  if (options.has_softcap()) raw->softcap = options.softcap();
  raw->causal = options.causal();
  if (options.has_window()) {
    raw->window = RawWindow{options.window().left(), options.window().right()};
  }
}

void ReadPlan(const v1::PlanOptions& plan, RawRequest* raw) {
  raw->layout = FromProto(plan.layout());
  raw->schedule = FromProto(plan.schedule());
  if (plan.has_world_size()) raw->world_size = plan.world_size();
  if (plan.has_stripe()) raw->stripe = plan.stripe();
}

}  // namespace ringattn
