#include "client/call/call_plan.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/transfer/tensor_bytes.h"
#include "common/base/limits.h"
#include "common/observability/trace_context.h"
#include "common/wire/durations.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"

namespace ringattn::client {
namespace {

TensorTypes TypesOf(const ForwardArgs& args) {
  return {args.dtype, args.output_dtype, args.lse_format, args.probability_rows};
}
TensorTypes TypesOf(const BackwardArgs& args) {
  return {args.dtype, args.output_dtype, args.lse_format};
}

// `writer`: of the call, if it has one.
template <typename Args>
absl::Status CheckSize(const Args& args, const AttentionSpec& spec,
                       const std::optional<WriterChoice>& writer, v1::TensorId tensor,
                       uint64_t given_bytes) {
  absl::StatusOr<uint64_t> bytes = TensorBytes(args.shape, TypesOf(args), tensor, args.options);
  if (!bytes.ok()) return bytes.status();
  if (writer.has_value()) {
    bytes = static_cast<uint64_t>(BytesOf(spec, writer->rows, static_cast<TensorId>(tensor)));
  }
  if (*bytes == given_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(TensorIdName(tensor), " has ", given_bytes, " bytes; its shape and dtype",
                   writer.has_value() ? " and the writer's tokens" : "", " require ", *bytes));
}

template <typename Args>
absl::Status CheckBufferSizes(const Args& args, const AttentionSpec& spec,
                              const std::optional<WriterChoice>& writer, const CallPlan& plan) {
  for (const InputTensor& input : plan.inputs) {
    absl::Status status = CheckSize(args, spec, writer, input.tensor, input.bytes.size());
    if (!status.ok()) return status;
  }
  for (const OutputTensor& output : plan.outputs) {
    absl::Status status = CheckSize(args, spec, writer, output.tensor, output.bytes.size());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Returns the call's writer, or nothing if it has none.
template <typename Args>
absl::StatusOr<std::optional<WriterChoice>> WriterOf(const Args& args, const AttentionSpec& spec,
                                                     const CallOptions& options) {
  std::optional<WriterChoice> none;
  if (!options.writer.has_value()) return none;
  const char* const why = options.request_id.empty()
                              ? "request_id is empty; all writers need the same"
                          : args.shape.packing() != v1::PACKING_UNSPECIFIED ? "shape.packing is set"
                          : spec.lse_per_document          ? "lse_format is PER_DOCUMENT"
                          : !spec.probability_rows.empty() ? "probability_rows is set"
                          : options.transport == TransportPreference::kRelay
                              ? "transport is the relay, which writers cannot use"
                              : nullptr;
  if (why != nullptr) return absl::InvalidArgumentError(absl::StrCat("writer: ", why));
  absl::StatusOr<WriterChoice> writer = ReadWriter(*options.writer);
  if (!writer.ok()) return writer.status();
  return std::optional<WriterChoice>(*std::move(writer));
}

v1::ReplyOptions Reply(const CallOptions& options, const ChunkLimits& limits) {
  v1::ReplyOptions reply;
  reply.set_max_chunk_bytes(limits.down_bytes);
  reply.set_with_crc32c(options.with_crc32c);
  reply.set_with_timeline(options.with_timeline);
  if (options.on_progress) {
    const int64_t nanoseconds = absl::ToInt64Nanoseconds(options.progress_interval);
    reply.mutable_progress_interval()->set_seconds(nanoseconds / 1'000'000'000);
    reply.mutable_progress_interval()->set_nanos(nanoseconds % 1'000'000'000);
  }
  return reply;
}

template <typename Header, typename Args>
void FillHeader(const Args& args, const CallOptions& options, const ChunkLimits& limits,
                Header* header) {
  header->set_request_id(options.request_id);
  *header->mutable_shape() = args.shape;
  header->set_dtype(args.dtype);
  *header->mutable_options() = args.options;
  *header->mutable_plan() = args.plan;
  *header->mutable_reply() = Reply(options, limits);
  header->mutable_reply()->set_output_dtype(args.output_dtype);
  header->mutable_reply()->set_lse_format(args.lse_format);
}

void SetRetain(absl::Duration ttl, v1::ForwardHeader* header) {
  v1::RetainOptions* retain = header->mutable_retain();
  if (ttl != absl::ZeroDuration()) SetDuration(ttl, retain->mutable_ttl());
}

// For smaller tensors, opening a stream to each worker takes longer than the relay.
constexpr uint64_t kLeastDirectBytes = 1 << 20;

uint64_t InputBytes(const CallPlan& plan) {
  uint64_t bytes = 0;
  for (const InputTensor& input : plan.inputs) bytes += input.bytes.size();
  return bytes;
}

// Inputs of at most kMaxInlineRunBytes together travel in the header. The coordinator can then pass
// all tensors on in one message each way, without a round trip for Accepted. Larger headers gain
// little, and a queue of them would take more memory.
template <typename Header>
void InlineSmallInputs(CallPlan* plan, Header* header) {
  if (plan->host != nullptr || plan->on_cuda || plan->direct || plan->writer.has_value() ||
      InputBytes(*plan) > kMaxInlineRunBytes) {
    return;
  }
  for (const InputTensor& input : plan->inputs) {
    if (input.bytes.empty()) continue;
    v1::InlineTensor* tensor = header->add_inline_tensors();
    tensor->set_tensor(input.tensor);
    std::string& data = *tensor->mutable_data();
    data.resize(input.bytes.size());
    CopyOut(input.bytes, 0, data.size(), reinterpret_cast<uint8_t*>(data.data()));
  }
  plan->inputs.clear();
  plan->sends_only_header = true;
  header->mutable_reply()->set_single_message(true);
}

void SetDirect(const CallOptions& options, CallPlan* plan) {
  uint64_t bytes = InputBytes(*plan);
  for (const OutputTensor& output : plan->outputs) bytes += output.bytes.size();
  switch (options.transport) {
    case TransportPreference::kRelay:
      plan->no_direct_reason = "the caller chose the relay";
      break;
    case TransportPreference::kHostMemory:
      plan->no_direct_reason = "the caller chose host memory";
      break;
    case TransportPreference::kCudaMemory:
      plan->no_direct_reason = "the caller chose CUDA memory";
      break;
    case TransportPreference::kDirect:
      plan->direct = true;
      plan->direct_required = options.transport_required;
      break;
    case TransportPreference::kAuto:
      plan->direct = bytes >= kLeastDirectBytes;
      plan->no_direct_reason =
          plan->direct ? "" : "no direct stream: the tensors have less than 1 MiB";
      break;
  }
  // Writers have no relay to fall back to.
  const bool only_memory =
      options.transport == TransportPreference::kCudaMemory ||
      (options.transport == TransportPreference::kHostMemory && options.transport_required);
  if (options.writer.has_value() && !only_memory) {
    plan->direct = true;
    plan->no_direct_reason.clear();
  }
}

// CUDA memory is offered alone, because the host cannot read the tensors. StartCudaCall handles
// calls that cannot use it.
void SetCuda(const CallOptions& options, CallPlan* plan) {
  const bool wished = options.transport == TransportPreference::kCudaMemory;
  if (wished && plan->host != nullptr && !plan->host->on_cuda()) {
    plan->host = nullptr;
    plan->no_host_reason = "the tensors lie in host memory";
  }
  plan->on_cuda = plan->host != nullptr || (wished && options.transport_required);
  if (plan->host != nullptr && !plan->host->on_cuda()) plan->on_cuda = false;
  if (!plan->on_cuda) return;
  plan->host_required = true;
  plan->direct = false;
  plan->no_direct_reason = "the tensors lie in CUDA memory";
}

void SetTransport(const CallOptions& options, const RegionIndex& regions, CallPlan* plan) {
  SetDirect(options, plan);
  plan->host_required =
      options.transport == TransportPreference::kHostMemory && options.transport_required;
  if (options.transport == TransportPreference::kRelay) {
    plan->no_host_reason = plan->no_direct_reason;
  } else if (options.transport == TransportPreference::kDirect) {
    plan->no_host_reason = "the caller chose direct streams";
  } else {
    plan->host =
        HostTensorLocations::Of(plan->inputs, plan->outputs, regions, &plan->no_host_reason);
  }
  SetCuda(options, plan);
  plan->only_host = plan->host != nullptr && options.transport_required &&
                    (options.transport == TransportPreference::kHostMemory ||
                     options.transport == TransportPreference::kCudaMemory);
}

absl::Status SetOptions(const CallOptions& options, const ChunkLimits& limits, CallPlan* plan) {
  if (!options.traceparent.empty() && !ReadTraceparent(options.traceparent)) {
    return absl::InvalidArgumentError(
        "traceparent is malformed; expected 00-<32 hex digits>-<16 hex digits>-<2 hex digits> in "
        "lower "
        "case");
  }
  plan->traceparent = options.traceparent;
  plan->max_chunk_bytes_up = limits.up_bytes;
  plan->with_crc32c = options.with_crc32c;
  plan->on_progress = options.on_progress;
  plan->on_accepted = options.on_accepted;
  return absl::OkStatus();
}

// The caller's buffers by tensor: the named members of the arguments, and `more`.
template <typename Bytes>
class Buffers {
 public:
  Buffers(std::initializer_list<std::pair<v1::TensorId, Bytes>> named, const TensorMap<Bytes>& more)
      : buffers_(more) {
    for (const auto& [tensor, bytes] : named) {
      if (!bytes.empty()) buffers_.emplace(tensor, bytes);
    }
  }

  // Returns the request's tensors with their buffers, in streaming order. Returns INVALID_ARGUMENT
  // for a buffer of a tensor that the request does not have.
  template <typename Tensor>
  absl::StatusOr<std::vector<Tensor>> InOrder(const std::vector<TensorId>& wanted) {
    std::vector<Tensor> tensors;
    for (TensorId id : wanted) {
      const v1::TensorId tensor = ToProto(id);
      const auto found = buffers_.find(tensor);
      tensors.push_back({tensor, found == buffers_.end() ? Bytes() : found->second});
      if (found != buffers_.end()) buffers_.erase(found);
    }
    if (buffers_.empty()) return tensors;
    return absl::InvalidArgumentError(
        absl::StrCat(TensorIdName(buffers_.begin()->first), " is not a tensor of this request"));
  }

 private:
  TensorMap<Bytes> buffers_;
};

// Splits packed results into their components, as workers send them, each in its place. Other
// tensors stay as they are. Requires correct sizes.
std::vector<OutputTensor> AsWorkersSend(const AttentionSpec& spec, const std::vector<TensorId>& ids,
                                        const std::vector<OutputTensor>& tensors) {
  std::vector<OutputTensor> all;
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::vector<TensorId> parts = PartsOf(ids[i]);
    if (parts.size() == 1 || tensors[i].bytes.empty()) {
      all.push_back(tensors[i]);
      continue;
    }
    uint64_t token_bytes = 0, offset = 0;
    for (TensorId part : parts) token_bytes += LayoutOf(spec, part).inner_bytes;
    for (TensorId part : parts) {
      const TensorLayout layout = LayoutOf(spec, part);
      const auto tokens = static_cast<uint64_t>(layout.outer * layout.rows);
      const auto part_bytes = static_cast<uint64_t>(layout.inner_bytes);
      all.push_back({ToProto(part),
                     {tensors[i].bytes.data() + offset, tokens, part_bytes, token_bytes},
                     layout});
      offset += part_bytes;
    }
  }
  return all;
}

template <typename Args>
bool HasDlse(const Args& args) {
  return args.more.count(v1::TENSOR_ID_DLSE) > 0;
}

// `has_residual`: the inputs are only those that are sent in addition to a residual.
template <typename Args>
absl::StatusOr<CallPlan> PlanTensors(CallKind kind, const Args& args, const CallOptions& options,
                                     bool recompute_forward, Buffers<ConstBytes> inputs,
                                     Buffers<MutableBytes> outputs, bool has_residual = false) {
  const absl::StatusOr<AttentionSpec> spec =
      SpecForTensors(args.shape, TypesOf(args), args.options, HasDlse(args));
  if (!spec.ok()) return spec.status();
  absl::StatusOr<std::optional<WriterChoice>> writer = WriterOf(args, *spec, options);
  if (!writer.ok()) return writer.status();
  const Direction direction =
      kind == CallKind::kForward ? Direction::kForward : Direction::kBackward;
  CallPlan plan;
  plan.kind = kind;
  std::vector<TensorId> wanted = InputsOf(*spec, direction, recompute_forward);
  if (has_residual) {
    wanted.erase(std::remove_if(wanted.begin(), wanted.end(),
                                [](TensorId id) { return !IsSentBesideResidual(id); }),
                 wanted.end());
  }
  auto in = inputs.template InOrder<InputTensor>(wanted);
  if (!in.ok()) return in.status();
  auto out = outputs.template InOrder<OutputTensor>(OutputsOf(*spec, direction));
  if (!out.ok()) return out.status();
  plan.inputs = *std::move(in);
  plan.outputs = *std::move(out);
  // Both lists have this order.
  for (size_t i = 0; i < wanted.size(); ++i) plan.inputs[i].layout = LayoutOf(*spec, wanted[i]);
  const std::vector<TensorId> given = OutputsOf(*spec, direction);
  for (size_t i = 0; i < given.size(); ++i) plan.outputs[i].layout = LayoutOf(*spec, given[i]);
  absl::Status sizes = CheckBufferSizes(args, *spec, *writer, plan);
  if (!sizes.ok()) return sizes;
  plan.direct_outputs = AsWorkersSend(*spec, given, plan.outputs);
  plan.writer = options.writer;
  plan.rows = *std::move(writer);
  return plan;
}

absl::StatusOr<CallPlan> ForwardTensors(const ForwardArgs& args, const ForwardResults& results,
                                        const CallOptions& options) {
  return PlanTensors(
      CallKind::kForward, args, options, /*recompute_forward=*/false,
      Buffers<ConstBytes>(
          {{v1::TENSOR_ID_Q, args.q}, {v1::TENSOR_ID_K, args.k}, {v1::TENSOR_ID_V, args.v}},
          args.more),
      Buffers<MutableBytes>({{v1::TENSOR_ID_OUT, results.out}, {v1::TENSOR_ID_LSE, results.lse}},
                            results.more));
}

Buffers<MutableBytes> Gradients(const BackwardResults& results) {
  return Buffers<MutableBytes>({{v1::TENSOR_ID_DQ, results.dq},
                                {v1::TENSOR_ID_DK, results.dk},
                                {v1::TENSOR_ID_DV, results.dv}},
                               results.more);
}

absl::StatusOr<CallPlan> BackwardTensors(const BackwardArgs& args, const BackwardResults& results,
                                         const CallOptions& options) {
  TensorMap<ConstBytes> inputs = args.more;
  if (args.has_forward_result) {
    inputs.emplace(v1::TENSOR_ID_OUT, args.out);
    inputs.emplace(v1::TENSOR_ID_LSE, args.lse);
  }
  return PlanTensors(CallKind::kBackward, args, options, !args.has_forward_result,
                     Buffers<ConstBytes>({{v1::TENSOR_ID_Q, args.q},
                                          {v1::TENSOR_ID_K, args.k},
                                          {v1::TENSOR_ID_V, args.v},
                                          {v1::TENSOR_ID_DOUT, args.dout}},
                                         inputs),
                     Gradients(results));
}

// The inputs of a Backward that reads a residual: dout and DLSE.
absl::StatusOr<CallPlan> ResidualBackwardTensors(const BackwardArgs& args,
                                                 const BackwardResults& results,
                                                 const CallOptions& options) {
  TensorMap<ConstBytes> inputs;
  const auto dlse = args.more.find(v1::TENSOR_ID_DLSE);
  if (dlse != args.more.end()) inputs.insert(*dlse);
  inputs.emplace(v1::TENSOR_ID_DOUT, args.dout);
  return PlanTensors(CallKind::kBackward, args, options, /*recompute_forward=*/false,
                     Buffers<ConstBytes>({}, inputs), Gradients(results), /*has_residual=*/true);
}

// Completes a plan that has its tensors: settings, transport, and the stream's first message.
template <typename Request>
absl::StatusOr<CallPlan> Complete(absl::StatusOr<CallPlan> tensors, const CallOptions& options,
                                  const ChunkLimits& limits, const RegionIndex& regions,
                                  Request request) {
  if (!tensors.ok()) return tensors.status();
  CallPlan plan = *std::move(tensors);
  if (absl::Status status = SetOptions(options, limits, &plan); !status.ok()) return status;
  SetTransport(options, regions, &plan);
  InlineSmallInputs(&plan, request.mutable_header());
  if (plan.host != nullptr) request.mutable_header()->mutable_reply()->set_single_message(true);
  // No chunk can follow, because the call needs no relay.
  if (plan.only_host) plan.sends_only_header = true;
  plan.header = wire::SerializeProto(request);
  return plan;
}

v1::BackwardRequest RequestOf(const BackwardArgs& args, const CallOptions& options,
                              const ChunkLimits& limits) {
  v1::BackwardRequest request;
  FillHeader(args, options, limits, request.mutable_header());
  request.mutable_header()->set_has_dlse(HasDlse(args));
  return request;
}

// A Backward that sends its tensors.
absl::StatusOr<CallPlan> PlanFullBackward(const BackwardArgs& args, const BackwardResults& results,
                                          const CallOptions& options, const ChunkLimits& limits,
                                          const RegionIndex& regions) {
  v1::BackwardRequest request = RequestOf(args, options, limits);
  request.mutable_header()->set_has_forward_result(args.has_forward_result);
  return Complete(BackwardTensors(args, results, options), options, limits, regions,
                  std::move(request));
}

// Completes a plan without tensors.
template <typename Request>
CallPlan CompletePreparation(CallKind kind, absl::Duration ttl, Request request) {
  CallPlan plan;
  plan.kind = kind;
  plan.sends_only_header = true;
  v1::PrepareOptions* prepare = request.mutable_header()->mutable_prepare();
  if (ttl != absl::ZeroDuration()) SetDuration(ttl, prepare->mutable_ttl());
  request.mutable_header()->mutable_reply()->set_single_message(true);
  plan.header = wire::SerializeProto(request);
  return plan;
}

void AddProbabilityRows(const ForwardArgs& args, v1::ForwardHeader* header) {
  for (const v1::ProbabilityRow& row : args.probability_rows) {
    *header->mutable_reply()->add_probability_rows() = row;
  }
}

bool HasTensors(const BackwardArgs& args) {
  return !args.q.empty() || !args.k.empty() || !args.v.empty() || args.has_forward_result ||
         args.more.count(v1::TENSOR_ID_QKV) > 0 || args.more.count(v1::TENSOR_ID_KV) > 0;
}

}  // namespace

absl::Status CheckSizes(const ForwardArgs& args, const ForwardResults& results,
                        const CallOptions& options) {
  return ForwardTensors(args, results, options).status();
}

absl::Status CheckSizes(const BackwardArgs& args, const BackwardResults& results,
                        const CallOptions& options) {
  return BackwardTensors(args, results, options).status();
}

absl::StatusOr<PlannedRequest> PlanRequest(const ForwardArgs& args, const ForwardResults& results,
                                           const CallOptions& options, const ChunkLimits& limits,
                                           const RegionIndex& regions) {
  v1::ForwardRequest request;
  FillHeader(args, options, limits, request.mutable_header());
  AddProbabilityRows(args, request.mutable_header());
  if (options.retain) SetRetain(*options.retain, request.mutable_header());
  auto plan = Complete(ForwardTensors(args, results, options), options, limits, regions,
                       std::move(request));
  if (!plan.ok()) return plan.status();
  return PlannedRequest{.plan = *std::move(plan)};
}

absl::StatusOr<PlannedRequest> PlanRequest(const BackwardArgs& args, const BackwardResults& results,
                                           const CallOptions& options, const ChunkLimits& limits,
                                           const RegionIndex& regions) {
  if (options.retain) {
    return absl::InvalidArgumentError("retain is set, but only a Forward leaves a residual");
  }
  if (args.residual_handle.empty()) {
    if (args.keep_residual) {
      return absl::InvalidArgumentError("keep_residual is set, but residual_handle is empty");
    }
    auto plan = PlanFullBackward(args, results, options, limits, regions);
    if (!plan.ok()) return plan.status();
    return PlannedRequest{.plan = *std::move(plan)};
  }
  v1::BackwardRequest request = RequestOf(args, options, limits);
  request.mutable_header()->set_residual_handle(args.residual_handle);
  request.mutable_header()->set_keep_residual(args.keep_residual);
  auto plan = Complete(ResidualBackwardTensors(args, results, options), options, limits, regions,
                       std::move(request));
  if (!plan.ok()) return plan.status();
  PlannedRequest planned{.plan = *std::move(plan)};
  if (HasTensors(args)) {
    auto fallback = PlanFullBackward(args, results, options, limits, regions);
    if (!fallback.ok()) return fallback.status();
    planned.fallback = std::make_shared<const CallPlan>(*std::move(fallback));
  }
  return planned;
}

CallPlan PlanPreparation(const ForwardArgs& args, absl::Duration ttl, const ChunkLimits& limits) {
  v1::ForwardRequest request;
  FillHeader(args, {}, limits, request.mutable_header());
  AddProbabilityRows(args, request.mutable_header());
  return CompletePreparation(CallKind::kForward, ttl, std::move(request));
}

CallPlan PlanPreparation(const BackwardArgs& args, absl::Duration ttl, const ChunkLimits& limits) {
  v1::BackwardRequest request = RequestOf(args, {}, limits);
  v1::BackwardHeader* header = request.mutable_header();
  header->set_has_forward_result(args.has_forward_result);
  header->set_residual_handle(args.residual_handle);
  header->set_keep_residual(args.keep_residual);
  return CompletePreparation(CallKind::kBackward, ttl, std::move(request));
}

}  // namespace ringattn::client
