#include "server/edge/call/replies.h"

#include <algorithm>
#include <utility>

#include "common/wire/durations.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"
#include "common/wire/token_spans.h"

namespace ringattn::server {
namespace {

void Describe(const AttentionSpec& spec, const std::optional<WriterChoice>& writer, TensorId id,
              v1::TensorDescriptor* descriptor) {
  descriptor->set_tensor(ToProto(id));
  descriptor->set_dtype(HasDType(id)                              ? ToProto(DTypeOf(spec, id))
                        : InfoOf(id).element == ElementOf::kInt32 ? v1::DATA_TYPE_INT32
                                                                  : v1::DATA_TYPE_UINT8);
  const std::vector<int64_t> dimensions =
      writer.has_value() ? DimensionsOf(spec, writer->rows, id) : DimensionsOf(spec, id);
  for (int64_t dimension : dimensions) descriptor->add_dimensions(dimension);
  descriptor->set_bytes(writer.has_value() ? BytesOf(spec, writer->rows, id) : BytesOf(spec, id));
}

template <typename Set>
grpc::ByteBuffer WrapIn(Direction direction, Set set) {
  if (direction == Direction::kForward) {
    v1::ForwardResponse response;
    set(&response);
    return wire::SerializeProto(response);
  }
  v1::BackwardResponse response;
  set(&response);
  return wire::SerializeProto(response);
}

}  // namespace

v1::PlanReport MakePlanReport(const Plan& plan, const std::vector<std::string>& members) {
  v1::PlanReport report;
  report.set_schedule(ToProto(plan.recipe.schedule));
  report.set_layout(ToProto(plan.recipe.layout));
  report.set_world_size(plan.shards.world_size);
  report.set_stripe(plan.recipe.stripe);
  for (const std::string& member : members) report.add_members(member);
  report.set_reason(plan.reason);
  SetSeconds(plan.predicted_compute_seconds, report.mutable_predicted_compute_time());
  report.set_exchanged_bytes(plan.exchanged_bytes);
  for (int rank = 0; rank < plan.shards.world_size; ++rank) {
    v1::RankPlan* added = report.add_ranks();
    added->set_rank(rank);
    added->set_tokens_q(RowsIn(plan.shards.q[rank]));
    added->set_tokens_kv(RowsIn(plan.shards.kv[rank]));
    added->set_tiles(plan.tiles[rank]);
    added->set_sent_bytes(plan.sent_bytes[rank]);
    added->set_buffer_bytes(plan.buffer_bytes[rank]);
    if (!plan.workspace_bytes.empty()) added->set_workspace_bytes(plan.workspace_bytes[rank]);
  }
  return report;
}

v1::Accepted MakeAccepted(const HeaderRequest& request, const AcceptRequest& accept,
                          const std::string& traceparent, const Limits& limits) {
  v1::Accepted accepted;
  accepted.set_traceparent(traceparent);
  accepted.set_request_id(accept.request_id);
  accepted.set_generation(accept.generation);
  std::vector<std::string> members;
  for (const RingMember& member : accept.members) members.push_back(member.name);
  *accepted.mutable_plan() = MakePlanReport(*accept.plan, members);
  accepted.set_transport(accept.transport);
  accepted.set_transport_reason(accept.transport_reason);
  const AttentionSpec& spec = request.valid.spec;
  const std::optional<WriterChoice>& writer = request.valid.transport.writer;
  for (TensorId id : request.valid.inputs) {
    const InlineTensors& tensors = *request.inline_tensors;
    const bool is_inline = std::any_of(tensors.begin(), tensors.end(),
                                       [id](const InlineData& data) { return data.tensor == id; });
    const bool comes_here = !is_inline && accept.transport == v1::TRANSPORT_RELAY;
    if (comes_here) Describe(spec, writer, id, accepted.add_inputs());
  }
  for (TensorId id : request.valid.outputs) Describe(spec, writer, id, accepted.add_outputs());
  accepted.set_max_chunk_bytes_up(limits.max_chunk_bytes_up);
  accepted.set_max_chunk_bytes_down(request.reply.max_chunk_bytes);
  accepted.set_recommended_chunk_bytes(limits.recommended_chunk_bytes);
  accepted.set_max_calls_per_stream(limits.max_calls_per_stream);
  return accepted;
}

void AddTickets(const AcceptRequest& accept, const ShardPlan& shards, v1::Accepted* accepted) {
  for (size_t rank = 0; rank < accept.members.size(); ++rank) {
    const RingMember& member = accept.members[rank];
    v1::ShardTicket* ticket = accepted->add_tickets();
    ticket->set_rank(static_cast<uint32_t>(rank));
    ticket->set_worker(member.name);
    ticket->add_endpoints(member.client_data_address);
    ticket->set_token(member.token);
    ToProto(shards.q[rank], ticket->mutable_q());
    ToProto(shards.kv[rank], ticket->mutable_kv());
  }
}

v1::Progress MakeProgress(const OperationView& view, const TransferTotals& totals) {
  const auto fraction = [](int64_t part, int64_t whole) {
    return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  v1::Progress progress;
  progress.set_state(view.state);
  if (view.state == v1::REQUEST_STATE_UPLOADING) {
    progress.set_fraction_done(fraction(totals.received_bytes, totals.bytes_up));
  } else if (view.state == v1::REQUEST_STATE_COMPUTING) {
    progress.set_fraction_done(view.computed_fraction);
  } else if (view.state == v1::REQUEST_STATE_DOWNLOADING) {
    progress.set_fraction_done(fraction(totals.sent_bytes, totals.bytes_down));
  }
  return progress;
}

v1::Summary MakeSummary(const BeginDownload& begin, const FinishRequest& finish, double flops,
                        const TransferTotals& totals) {
  v1::Summary summary;
  const std::pair<v1::Stage, absl::Duration> stages[] = {
      {v1::STAGE_QUEUE, begin.queue_time},
      {v1::STAGE_UPLOAD, begin.upload_time},
      {v1::STAGE_COMPUTE, begin.compute_time},
      {v1::STAGE_DOWNLOAD, finish.download_time}};
  for (const auto& [stage, duration] : stages) {
    v1::StageTime* added = summary.add_stages();
    added->set_stage(stage);
    SetDuration(duration, added->mutable_time());
  }
  for (const v1::RankReport& report : begin.reports) *summary.add_ranks() = report;
  SetDuration(begin.compute_time, summary.mutable_compute_time());
  summary.set_flops(flops);
  summary.set_bytes_up(totals.bytes_up);
  summary.set_bytes_down(totals.bytes_down);
  summary.set_residual_handle(finish.residual_handle);
  summary.set_residual_reason(finish.residual_reason);
  if (finish.prepared.has_value()) {
    v1::PreparedReport* prepared = summary.mutable_prepared();
    SetDuration(finish.prepared->ttl, prepared->mutable_ttl());
    prepared->set_bytes(static_cast<uint64_t>(finish.prepared->bytes));
    prepared->set_found(static_cast<uint32_t>(finish.prepared->found));
  }
  return summary;
}

grpc::ByteBuffer Wrap(Direction direction, v1::Accepted accepted) {
  return WrapIn(direction, [&](auto* r) { *r->mutable_accepted() = std::move(accepted); });
}

grpc::ByteBuffer Wrap(Direction direction, v1::Progress progress) {
  return WrapIn(direction, [&](auto* r) { *r->mutable_progress() = std::move(progress); });
}

grpc::ByteBuffer Wrap(Direction direction, v1::Summary summary) {
  return WrapIn(direction, [&](auto* r) { *r->mutable_summary() = std::move(summary); });
}

// A field of SingleReply has the number of the response's field that it replaces, so its encoding
// is that of the response.
grpc::ByteBuffer MakeSingleReply(const std::vector<wire::MessageBuffer>& messages) {
  std::vector<grpc::Slice> slices(1);  // the first is the prefix
  uint64_t bytes = 0;
  for (const wire::MessageBuffer& message : messages) {
    bytes += message.Length();
    std::vector<grpc::Slice> parts;
    (void)message.get().Dump(&parts);  // fails for compressed messages only
    slices.insert(slices.end(), parts.begin(), parts.end());
  }
  const wire::ChunkPrefix prefix =
      wire::EncodeFieldPrefix(v1::ForwardResponse::kSingleFieldNumber, bytes);
  slices.front() = grpc::Slice(prefix.bytes.data(), prefix.size);
  return {slices.data(), slices.size()};
}

}  // namespace ringattn::server
