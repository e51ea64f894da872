#include "server/edge/call/call_header.h"

#include <sys/random.h>

#include <cstdlib>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/observability/log.h"
#include "common/observability/trace_context.h"
#include "common/request/residual_header.h"
#include "common/wire/grpc_slices.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

std::string MakeRequestId() {
  absl::BitGen random;
  return absl::StrCat("req-", absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

using Checked = std::variant<HeaderRequest, grpc::Status, ResidualHeader>;

// Adds a missing request_id, or converts the rejection.
std::variant<HeaderRequest, grpc::Status> FinishCheck(std::variant<HeaderRequest, Rejection> read,
                                                      const Limits& limits) {
  if (const auto* rejection = std::get_if<Rejection>(&read)) {
    return ToGrpcStatus(*rejection, limits);
  }
  auto request = std::get<HeaderRequest>(std::move(read));
  if (request.request_id.empty()) request.request_id = MakeRequestId();
  return request;
}

grpc::Status NotProtobuf(const Limits& limits) {
  Rejection rejection;
  rejection.violations = {{"header", "the first message is not valid protobuf"}};
  return ToGrpcStatus(rejection, limits);
}

template <typename First>
Checked FinishCheckOfFirst(First first, const Limits& limits) {
  auto checked = FinishCheck(ReadHeader(std::move(first), limits), limits);
  if (auto* status = std::get_if<grpc::Status>(&checked)) return *status;
  return std::get<HeaderRequest>(std::move(checked));
}

}  // namespace

std::string MakeResidualHandle() {
  unsigned char bits[16];
  // getrandom neither blocks nor returns less for so few bytes; without random bits there is no
  // secret.
  if (getrandom(bits, sizeof(bits), 0) != static_cast<ssize_t>(sizeof(bits))) std::abort();
  return absl::BytesToHexString({reinterpret_cast<const char*>(bits), sizeof(bits)});
}

Checked CheckHeader(Direction direction, grpc::ByteBuffer* message, const Limits& limits) {
  const auto bytes = static_cast<int64_t>(message->Length());
  if (bytes > limits.max_header_bytes) {
    message->Clear();
    return ToGrpcStatus(HeaderTooLarge(bytes, limits.max_header_bytes), limits);
  }
  if (direction == Direction::kForward) {
    absl::StatusOr<v1::ForwardRequest> first = wire::ParseProto<v1::ForwardRequest>(message);
    message->Clear();
    return first.ok() ? FinishCheckOfFirst(*std::move(first), limits) : NotProtobuf(limits);
  }
  absl::StatusOr<v1::BackwardRequest> first = wire::ParseProto<v1::BackwardRequest>(message);
  message->Clear();
  if (!first.ok()) return NotProtobuf(limits);
  if (!first->header().residual_handle().empty()) return ResidualHeader{*std::move(first)};
  return FinishCheckOfFirst(*std::move(first), limits);
}

std::variant<HeaderRequest, grpc::Status> CompleteHeader(ResidualHeader header,
                                                         const ResidualView& residual,
                                                         const Limits& limits) {
  if (residual.failure) return ToGrpcStatus(*residual.failure, limits);
  // A retry repeats the client's header, not the completed one.
  const uint64_t fingerprint = FingerprintOf(header.first.header());
  std::optional<Rejection> differs = FillFromResidual(
      *residual.spec, residual.choice, residual.members, limits, header.first.mutable_header());
  if (differs) return ToGrpcStatus(*differs, limits);
  auto checked = FinishCheck(ReadHeader(std::move(header.first), limits), limits);
  if (auto* request = std::get_if<HeaderRequest>(&checked)) {
    const Tuning tuning = request->valid.choice.tuning;
    request->valid.choice = residual.choice;
    request->valid.choice.tuning = tuning;
    request->fingerprint = fingerprint;
  }
  return checked;
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

std::string ValidTraceparent(const std::string& text) {
  if (text.empty()) return "";
  const std::optional<std::string> valid = ReadTraceparent(text);
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
