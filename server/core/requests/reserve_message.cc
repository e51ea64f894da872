#include "server/core/requests/reserve_message.h"

#include "common/request/option_fields.h"
#include "common/wire/proto_values.h"
#include "common/wire/token_spans.h"

namespace ringattn::server {
v1::Reserve MakeReserve(const RequestArrived& request, const AttentionSpec& spec, const Plan& plan,
                        const std::string& operation_id, uint64_t generation,
                        const std::vector<uint32_t>& members) {
  v1::Reserve reserve;
  reserve.set_operation_id(operation_id);
  reserve.set_generation(generation);
  reserve.mutable_members()->Add(members.begin(), members.end());
  const ProgramRecipe& recipe = plan.recipe;
  reserve.set_backward(recipe.direction == Direction::kBackward);
  reserve.set_recompute_forward(recipe.recompute_forward);
  ToProto(spec.shape, reserve.mutable_shape());
  reserve.set_dtype(ToProto(spec.dtype));
  WriteOptions(spec.options, reserve.mutable_options());
  reserve.set_layout(ToProto(recipe.layout));
  reserve.set_schedule(ToProto(recipe.schedule));
  reserve.set_stripe(recipe.stripe);
  reserve.set_heads_per_step(static_cast<uint32_t>(recipe.heads_per_step));
  reserve.set_group_size(static_cast<uint32_t>(recipe.group_size));
  reserve.set_with_timeline(request.with_timeline);
  reserve.set_has_dlse(spec.has_dlse);
  reserve.set_fp32_results(spec.fp32_results);
  ToProto(recipe.tuning, reserve.mutable_tuning());
  for (const ProbabilityRow& row : spec.probability_rows) {
    v1::ProbabilityRow* added = reserve.add_probability_rows();
    added->set_batch(row.batch);
    added->set_position(row.position);
  }
  reserve.set_lse_per_document(spec.lse_per_document);
  reserve.set_retain(recipe.keeps_inputs);
  reserve.set_request_id(request.request_id);
  reserve.set_traceparent(request.traceparent);
  reserve.set_principal(request.principal);
  return reserve;
}

void AddLocations(const TransportChoice& choice, v1::Reserve* reserve) {
  for (const TensorLocationChoice& location : choice.places) {
    v1::TensorLocation* added = reserve->add_places();
    added->set_tensor(ToProto(location.tensor));
    added->set_region_id(location.region_id);
    added->set_offset(location.offset);
    added->set_writer(location.writer);
    added->set_fence_number(location.fence_number);
  }
}

void AddWriters(const TransportChoice& choice, v1::Reserve* reserve) {
  for (const WriterRows& rows : choice.writers) {
    v1::WriterRows* added = reserve->add_writers();
    ToProto(rows.q, added->mutable_q());
    ToProto(rows.kv, added->mutable_kv());
  }
}

}  // namespace ringattn::server
