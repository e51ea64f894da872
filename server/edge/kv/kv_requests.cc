#include "server/edge/kv/kv_requests.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include "absl/hash/hash.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/kv/cache_spec.h"
#include "common/kv/kv_error.h"
#include "common/request/enum_values.h"
#include "common/security/token.h"

namespace ringattn::server {
namespace {

constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;

Failure BadField(const char* field, const std::string& message) {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.reason = "INVALID_REQUEST";
  failure.field = field;
  failure.message = absl::StrCat(field, ": ", message);
  return failure;
}

Failure OverLimit(const char* field, const std::string& message) {
  Failure failure = BadField(field, message);
  failure.code = absl::StatusCode::kResourceExhausted;
  failure.reason = "OVER_LIMIT";
  return failure;
}

// Of everything but request_id. Stable within one process.
uint64_t FingerprintOfCreate(v1::CreateCacheRequest request) {
  request.clear_request_id();
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    request.SerializeToCodedStream(&coded);
  }
  return absl::HashOf(bytes);
}

std::optional<Failure> ReadTtl(const v1::CreateCacheRequest& request, const Limits& limits,
                               absl::Duration* ttl) {
  *ttl = limits.default_kv_ttl;
  if (!request.has_ttl()) return std::nullopt;
  const double seconds =
      static_cast<double>(request.ttl().seconds()) + 1e-9 * request.ttl().nanos();
  const double most = absl::ToDoubleSeconds(limits.max_kv_ttl);
  if (!(seconds > 0 && seconds <= most)) {
    return BadField(
        "ttl", absl::StrCat("is ", seconds, " s; it must be more than 0 and at most ", most, " s"));
  }
  *ttl = absl::Seconds(seconds);
  return std::nullopt;
}

std::optional<Failure> ReadMembers(const v1::CreateCacheRequest& request, const Limits& limits,
                                   KvCacheRequested* event) {
  const auto most = static_cast<uint32_t>(limits.max_world_size);
  if (request.has_world_size()) {
    if (request.world_size() < 1 || request.world_size() > most) {
      return BadField("world_size",
                      absl::StrCat("is ", request.world_size(), "; it must be 1 to ", most));
    }
    event->world_size = static_cast<int>(request.world_size());
  }
  if (request.members_size() > limits.max_world_size) {
    return BadField(
        "members", absl::StrCat("has ", request.members_size(), " entries; the maximum is ", most));
  }
  event->members.assign(request.members().begin(), request.members().end());
  const std::set<std::string> names(event->members.begin(), event->members.end());
  if (names.size() != event->members.size() || names.count("") > 0) {
    return BadField("members", "names must be distinct and not empty");
  }
  if (event->world_size && !event->members.empty() &&
      *event->world_size != static_cast<int>(event->members.size())) {
    return BadField("world_size", absl::StrCat("is ", *event->world_size, "; members has ",
                                               event->members.size(), " entries"));
  }
  return std::nullopt;
}

}  // namespace

Failure KvRequestFailure(const absl::Status& status) {
  Failure failure;
  failure.code = status.code();
  failure.message = std::string(status.message());
  failure.reason = KvErrorReason(status);
  if (!failure.reason.empty()) return failure;
  switch (status.code()) {
    case absl::StatusCode::kUnimplemented:
      failure.reason = "NOT_SERVED";
      break;
    case absl::StatusCode::kResourceExhausted:
      failure.reason = "OVER_LIMIT";
      break;
    default:
      failure.reason = "INVALID_REQUEST";
      break;
  }
  // Fields have dots, brackets and no spaces: "rows[3].keep_length is 5; ...".
  failure.field = failure.message.substr(0, failure.message.find_first_of(" :"));
  return failure;
}

std::variant<KvCacheRequested, Failure> ReadCreateCache(const v1::CreateCacheRequest& request,
                                                        const Caller& caller,
                                                        const Limits& limits) {
  KvCacheRequested event;
  event.principal = caller.principal;
  event.client = caller.client;
  event.terms = caller.terms;
  if (static_cast<int64_t>(request.request_id().size()) > limits.max_request_id_bytes) {
    return OverLimit("request_id",
                     absl::StrCat("has ", request.request_id().size(), " bytes; the maximum is ",
                                  limits.max_request_id_bytes));
  }
  event.request_id = request.request_id();
  event.fingerprint = FingerprintOfCreate(request);
  const auto spec_bytes = static_cast<int64_t>(request.spec().ByteSizeLong());
  if (spec_bytes > limits.max_kv_spec_bytes) {
    return OverLimit("spec", absl::StrCat("has ", spec_bytes, " bytes; the maximum is ",
                                          limits.max_kv_spec_bytes));
  }
  absl::StatusOr<KvCacheSpec> spec = ParseKvCacheSpec(request.spec(), limits);
  if (!spec.ok()) return KvRequestFailure(spec.status());
  event.spec = std::make_shared<const KvCacheSpec>(*std::move(spec));
  if (auto failure = ReadTtl(request, limits, &event.ttl)) return *std::move(failure);
  if (auto failure = ReadMembers(request, limits, &event)) return *std::move(failure);
  event.divide_blocks = request.divide_blocks();
  event.id = RandomToken().substr(0, kKvCacheIdBytes);
  return event;
}

std::variant<KvWriterRequested, Failure> ReadOpenCache(const v1::OpenCacheRequest& request,
                                                       const Caller& caller) {
  KvWriterRequested event;
  event.principal = caller.principal;
  event.id = request.cache_id();
  event.answered_step = request.answered_step();
  event.token_seed = RandomToken();
  if (request.accept_size() > v1::Transport_ARRAYSIZE) {
    return BadField("accept", absl::StrCat("has ", request.accept_size(),
                                           " entries; list each transport once"));
  }
  event.accepts_relay = request.accept().empty();
  for (const int transport : request.accept()) {
    if (!v1::Transport_IsValid(transport) || transport == v1::TRANSPORT_UNSPECIFIED) {
      return BadField("accept", OtherThan<v1::Transport>(transport));
    }
    event.accepts_host_memory |=
        transport == v1::TRANSPORT_HOST_MEMORY && !event.accepts_direct && !event.accepts_relay;
    event.accepts_direct |= transport == v1::TRANSPORT_DIRECT && !event.accepts_relay;
    event.accepts_relay |= transport == v1::TRANSPORT_RELAY;
  }
  event.region_id = request.region_id();
  if (event.accepts_host_memory && event.region_id.empty()) {
    return BadField("region_id", "is empty; TRANSPORT_HOST_MEMORY needs a region");
  }
  if (!event.accepts_host_memory && !event.accepts_direct && !event.accepts_relay) {
    Failure failure =
        BadField("accept", "steps use TRANSPORT_HOST_MEMORY, TRANSPORT_DIRECT or TRANSPORT_RELAY");
    failure.code = absl::StatusCode::kUnimplemented;
    failure.reason = "NOT_SERVED";
    return failure;
  }
  return event;
}

std::variant<KvPage, Failure> ReadListCaches(const v1::ListCachesRequest& request) {
  KvPage page;
  const uint32_t size = request.page_size() == 0 ? kDefaultPageSize : request.page_size();
  if (size > kMaxPageSize) {
    return BadField("page_size", absl::StrCat("is ", size, "; the maximum is ", kMaxPageSize));
  }
  page.size = static_cast<int>(size);
  // A page token is the last id of the page before, in hexadecimal.
  const std::string& token = request.page_token();
  if (!token.empty()) {
    const bool is_hex = token.size() == 2 * kKvCacheIdBytes &&
                        std::all_of(token.begin(), token.end(), absl::ascii_isxdigit);
    if (!is_hex) return BadField("page_token", "is not a next_page_token of this server");
    page.after = absl::HexStringToBytes(token);
  }
  return page;
}

}  // namespace ringattn::server
