#include "tests/e2e/service_case.h"

#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cli/region_stage.h"
#include "common/oracle/comparator.h"
#include "common/oracle/generator.h"
#include "common/oracle/oracle.h"
#include "common/request/option_fields.h"
#include "common/wire/proto_values.h"
#include "tests/sweep/run_problem.h"

namespace ringattn::tests {

using namespace ringattn::client;  // what is under test
namespace {

// The state that both directions share.
template <typename Args>
void FillArgs(const Case& c, const TensorMap& inputs, Args* args) {
  ToProto(c.spec.shape, &args->shape);
  WriteOptions(c.spec.options, &args->options);
  args->plan.set_layout(ToProto(c.layout));
  args->plan.set_schedule(ToProto(c.world_size == 1 ? ScheduleKind::kSingle : c.schedule));
  if (c.world_size > 1 && c.heads_per_step != 0) {
    args->plan.set_heads_per_step(static_cast<uint32_t>(c.heads_per_step));
  }
  if (c.world_size > 1 && c.group_size != 0) {
    args->plan.set_group_size(static_cast<uint32_t>(c.group_size));
  }
  args->plan.set_world_size(c.world_size);
  if (c.layout == Layout::kStriped) args->plan.set_stripe(c.stripe);
  args->dtype = ToProto(c.spec.dtype);
  if (c.spec.fp32_results) args->output_dtype = v1::DATA_TYPE_FLOAT32;
  args->q = BytesOf(inputs.at(TensorId::kQ));
  args->k = BytesOf(inputs.at(TensorId::kK));
  args->v = BytesOf(inputs.at(TensorId::kV));
  for (TensorId id : InputsOf(c.spec, c.direction, c.recompute_forward)) {
    if (InfoOf(id).is_present != nullptr) args->more[ToProto(id)] = BytesOf(inputs.at(id));
  }
}

// Space for an output, filled with a pattern that no result has.
MutableBytes Prepare(const AttentionSpec& spec, TensorId id, TensorMap* outputs) {
  std::vector<uint8_t>& bytes = (*outputs)[id];
  bytes.assign(LayoutOf(spec, id).bytes(), 0xff);
  return MutableBytesOf(bytes);
}

CallResult CallService(Client& client, const Case& c, const TensorMap& inputs,
                       absl::Duration deadline, const std::string& transport, TensorMap* outputs) {
  CallOptions options;
  options.deadline = deadline;
  cli::SetTransport(transport, &options);
  if (c.direction == Direction::kForward) {
    ForwardArgs args;
    FillArgs(c, inputs, &args);
    ForwardResults results{.out = Prepare(c.spec, TensorId::kOut, outputs),
                           .lse = Prepare(c.spec, TensorId::kLse, outputs)};
    for (const ProbabilityRow& row : c.spec.probability_rows) {
      v1::ProbabilityRow& added = args.probability_rows.emplace_back();
      added.set_batch(row.batch);
      added.set_position(row.position);
    }
    if (!c.spec.probability_rows.empty()) {
      results.more[v1::TENSOR_ID_PROBABILITIES] =
          Prepare(c.spec, TensorId::kProbabilities, outputs);
    }
    return client.Forward(args, results, options);
  }
  BackwardArgs args;
  FillArgs(c, inputs, &args);
  args.dout = BytesOf(inputs.at(TensorId::kDout));
  args.has_forward_result = !c.recompute_forward;
  if (args.has_forward_result) {
    args.out = BytesOf(inputs.at(TensorId::kOut));
    args.lse = BytesOf(inputs.at(TensorId::kLse));
  }
  client::TensorMap<MutableBytes> more;
  for (TensorId id : OutputsOf(c.spec, Direction::kBackward)) {
    if (InfoOf(id).is_present != nullptr) more[ToProto(id)] = Prepare(c.spec, id, outputs);
  }
  return client.Backward(args,
                         BackwardResults{.dq = Prepare(c.spec, TensorId::kDq, outputs),
                                         .dk = Prepare(c.spec, TensorId::kDk, outputs),
                                         .dv = Prepare(c.spec, TensorId::kDv, outputs),
                                         .more = std::move(more)},
                         options);
}

}  // namespace

ServiceOutcome RunThroughService(Client& client, const Case& c, absl::Duration deadline,
                                 const std::string& transport) {
  const bool backward = c.direction == Direction::kBackward;
  const oracle::InputTensors drawn = oracle::GenerateInputs(c.spec, c.data, c.data_seed, backward);
  const oracle::Result expected = oracle::EvaluateAll(c.spec, drawn.view());
  TensorMap inputs = ToTensorMap(drawn);
  if (backward && !c.recompute_forward) AddForwardResult(c.spec, expected, &inputs);
  TensorMap outputs;
  const CallResult result = CallService(client, c, inputs, deadline, transport, &outputs);
  const absl::Time ended = absl::Now();
  if (!result.ok()) return {result.status(), ended, ""};
  const oracle::Report report = oracle::Compare(c.spec, expected, ToOutputs(outputs));
  return {absl::OkStatus(), ended, report.passed() ? "" : report.ToString()};
}

}  // namespace ringattn::tests
