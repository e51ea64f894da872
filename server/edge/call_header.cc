#include "server/edge/call_header.h"

#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "common/observability/log.h"
#include "common/observability/trace_context.h"
#include "common/wire/grpc_slices.h"
#include "server/edge/call_failures.h"
#include "server/edge/error_details.h"

namespace ringattn::server {
namespace {

std::string MakeRequestId() {
  absl::BitGen random;
  return absl::StrCat("req-", absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

template <typename Request>
std::variant<HeaderRequest, Rejection> ParseHeader(grpc::ByteBuffer* message,
                                                   const Limits& limits) {
  absl::StatusOr<Request> first = wire::ParseProto<Request>(message);
  if (first.ok()) return ReadHeader(*std::move(first), limits);
  Rejection rejection;
  rejection.violations = {{"header", "the first message is not valid protobuf"}};
  return rejection;
}

}  // namespace

std::variant<HeaderRequest, grpc::Status> CheckHeader(Direction direction,
                                                      grpc::ByteBuffer* message,
                                                      const Limits& limits) {
  const auto bytes = static_cast<int64_t>(message->Length());
  if (bytes > limits.max_header_bytes) {
    message->Clear();
    return ToGrpcStatus(HeaderTooLarge(bytes, limits.max_header_bytes), limits);
  }
  std::variant<HeaderRequest, Rejection> read =
      direction == Direction::kForward ? ParseHeader<v1::ForwardRequest>(message, limits)
                                       : ParseHeader<v1::BackwardRequest>(message, limits);
  message->Clear();
  if (const auto* rejection = std::get_if<Rejection>(&read)) {
    return ToGrpcStatus(*rejection, limits);
  }
  auto request = std::get<HeaderRequest>(std::move(read));
  if (request.request_id.empty()) request.request_id = MakeRequestId();
  return request;
}

std::string TraceparentOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  const auto [first, last] = metadata.equal_range(kTraceparentKey);
  if (first == last) return "";
  const absl::string_view text(first->second.data(), first->second.size());
  std::optional<std::string> valid;
  if (std::next(first) == last) valid = ReadTraceparent(text);
  if (!valid) LogWarning("not a valid traceparent; ignored", {{"value", text.substr(0, 64)}});
  return valid.value_or("");
}

void LogArrival(const HeaderRequest& request, const std::string& traceparent) {
  const AttentionShape& shape = request.valid.spec.shape;
  LogInfo("request arrived",
          {{"request_id", request.request_id},
           {"traceparent", traceparent},
           {"method", request.valid.direction == Direction::kForward ? "Forward" : "Backward"},
           {"batch", shape.batch},
           {"seq_len_q", shape.seq_len_q},
           {"seq_len_kv", shape.seq_len_kv},
           {"heads", shape.num_heads},
           {"head_dim", shape.head_dim}});
}

}  // namespace ringattn::server
