#include "client/call_plan.h"

#include "absl/strings/str_cat.h"
#include "client/tensor_bytes.h"
#include "common/wire/grpc_slices.h"

namespace ringattn::client {
namespace {

absl::Status CheckSize(const v1::AttentionShape& shape, v1::DataType dtype, v1::TensorId tensor,
                       uint64_t given_bytes) {
  const absl::StatusOr<uint64_t> bytes = TensorBytes(shape, dtype, tensor);
  if (!bytes.ok()) return bytes.status();
  if (*bytes == given_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(TensorIdName(tensor), " has ", given_bytes, " bytes, its shape needs ", *bytes));
}

absl::Status CheckSizes(const v1::AttentionShape& shape, v1::DataType dtype, const CallPlan& plan) {
  for (const InputTensor& input : plan.inputs) {
    absl::Status status = CheckSize(shape, dtype, input.tensor, input.bytes.size());
    if (!status.ok()) return status;
  }
  for (const OutputTensor& output : plan.outputs) {
    absl::Status status = CheckSize(shape, dtype, output.tensor, output.bytes.size());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
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
void FillHeader(const Args& args, const CallOptions& options, const std::string& request_id,
                const ChunkLimits& limits, Header* header) {
  header->set_request_id(request_id);
  *header->mutable_shape() = args.shape;
  header->set_dtype(args.dtype);
  *header->mutable_options() = args.options;
  *header->mutable_plan() = args.plan;
  *header->mutable_reply() = Reply(options, limits);
}

// Inputs that together are no more than this travel in the header: the chunk's round
// trip for Accepted would take longer than they do, and a queue of headers stays small.
constexpr uint64_t kMaxInlineBytes = 64 << 10;

template <typename Header>
void InlineSmallInputs(CallPlan* plan, Header* header) {
  uint64_t bytes = 0;
  for (const InputTensor& input : plan->inputs) bytes += input.bytes.size();
  if (bytes > kMaxInlineBytes) return;
  for (const InputTensor& input : plan->inputs) {
    if (input.bytes.empty()) continue;
    v1::InlineTensor* tensor = header->add_inline_tensors();
    tensor->set_tensor(input.tensor);
    std::string& data = *tensor->mutable_data();
    data.resize(input.bytes.size());
    CopyOut(input.bytes, 0, data.size(), reinterpret_cast<uint8_t*>(data.data()));
  }
  plan->inputs.clear();
}

void SetOptions(const CallOptions& options, const ChunkLimits& limits, CallPlan* plan) {
  plan->max_chunk_bytes_up = limits.up_bytes;
  plan->with_crc32c = options.with_crc32c;
  plan->on_progress = options.on_progress;
}

template <typename Input, typename Output>
CallPlan ForwardTensors(const BasicForwardArgs<Input>& args,
                        const BasicForwardResults<Output>& results) {
  CallPlan plan;
  plan.kind = CallKind::kForward;
  plan.inputs = {{v1::TENSOR_ID_Q, args.q}, {v1::TENSOR_ID_K, args.k}, {v1::TENSOR_ID_V, args.v}};
  plan.outputs = {{v1::TENSOR_ID_OUT, results.out}, {v1::TENSOR_ID_LSE, results.lse}};
  return plan;
}

template <typename Input, typename Output>
CallPlan BackwardTensors(const BasicBackwardArgs<Input>& args,
                         const BasicBackwardResults<Output>& results) {
  CallPlan plan;
  plan.kind = CallKind::kBackward;
  plan.inputs = {{v1::TENSOR_ID_Q, args.q},
                 {v1::TENSOR_ID_K, args.k},
                 {v1::TENSOR_ID_V, args.v},
                 {v1::TENSOR_ID_DOUT, args.dout}};
  if (args.has_forward_result) {
    plan.inputs.push_back({v1::TENSOR_ID_OUT, args.out});
    plan.inputs.push_back({v1::TENSOR_ID_LSE, args.lse});
  }
  plan.outputs = {{v1::TENSOR_ID_DQ, results.dq},
                  {v1::TENSOR_ID_DK, results.dk},
                  {v1::TENSOR_ID_DV, results.dv}};
  return plan;
}

}  // namespace

absl::Status CheckForwardSizes(const ForwardArgs& args, const ForwardResults& results) {
  return CheckSizes(args.shape, args.dtype, ForwardTensors(args, results));
}

absl::Status CheckBackwardSizes(const BackwardArgs& args, const BackwardResults& results) {
  return CheckSizes(args.shape, args.dtype, BackwardTensors(args, results));
}

absl::StatusOr<CallPlan> PlanForward(const BasicForwardArgs<ConstRuns>& args,
                                     const BasicForwardResults<MutableRuns>& results,
                                     const CallOptions& options, const std::string& request_id,
                                     const ChunkLimits& limits) {
  CallPlan plan = ForwardTensors(args, results);
  SetOptions(options, limits, &plan);
  if (absl::Status status = CheckSizes(args.shape, args.dtype, plan); !status.ok()) return status;
  v1::ForwardRequest request;
  FillHeader(args, options, request_id, limits, request.mutable_header());
  InlineSmallInputs(&plan, request.mutable_header());
  plan.header = wire::SerializeProto(request);
  return plan;
}

absl::StatusOr<CallPlan> PlanBackward(const BasicBackwardArgs<ConstRuns>& args,
                                      const BasicBackwardResults<MutableRuns>& results,
                                      const CallOptions& options, const std::string& request_id,
                                      const ChunkLimits& limits) {
  CallPlan plan = BackwardTensors(args, results);
  SetOptions(options, limits, &plan);
  if (absl::Status status = CheckSizes(args.shape, args.dtype, plan); !status.ok()) return status;
  v1::BackwardRequest request;
  FillHeader(args, options, request_id, limits, request.mutable_header());
  request.mutable_header()->set_has_forward_result(args.has_forward_result);
  InlineSmallInputs(&plan, request.mutable_header());
  plan.header = wire::SerializeProto(request);
  return plan;
}

}  // namespace ringattn::client
