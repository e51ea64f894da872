#include "server/core/kv/kv_failures.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::server {
namespace {

using absl::StatusCode;

Failure KvFailure(StatusCode code, const char* reason, std::string message) {
  Failure failure;
  failure.code = code;
  failure.reason = reason;
  failure.message = std::move(message);
  return failure;
}

Failure RetryableKvFailure(StatusCode code, const char* reason, std::string message,
                           absl::Duration retry_after) {
  Failure failure = KvFailure(code, reason, std::move(message));
  failure.retry_after = retry_after;
  return failure;
}

Failure BadKvField(const char* field, const std::string& message) {
  Failure failure = KvFailure(StatusCode::kInvalidArgument, "INVALID_REQUEST",
                              absl::StrCat(field, ": ", message));
  failure.field = field;
  return failure;
}

Failure QuotaReached(StatusCode code, const char* reason, const std::string& client,
                     const std::string& description) {
  Failure failure = KvFailure(code, reason, absl::StrCat("this client's ", description));
  failure.quota = Failure::Quota{absl::StrCat("client:", client), description};
  return failure;
}

}  // namespace

const char* KvCacheEndName(KvCacheEnd end) {
  switch (end) {
    case KvCacheEnd::kExpired:
      return "expired";
    case KvCacheEnd::kDeleted:
      return "deleted";
    case KvCacheEnd::kLost:
      return "lost";
    case KvCacheEnd::kRanksDiffer:
      return "ranks_differ";
    case KvCacheEnd::kInconsistent:
      return "inconsistent";
  }
  return "";
}

const char* KvCacheEndReason(KvCacheEnd end) {
  switch (end) {
    case KvCacheEnd::kExpired:
      return "KV_EXPIRED";
    case KvCacheEnd::kDeleted:
      return "KV_DELETED";
    case KvCacheEnd::kLost:
      return "KV_LOST";
    case KvCacheEnd::kRanksDiffer:
      return "KV_RANKS_DIFFER";
    case KvCacheEnd::kInconsistent:
      return "KV_INCONSISTENT";
  }
  return "";
}

Failure KvNotFound() {
  Failure failure =
      KvFailure(StatusCode::kNotFound, "KV_NOT_FOUND", "cache_id: this client has no such cache");
  failure.field = "cache_id";
  return failure;
}

Failure KvEnded(KvCacheEnd end, const std::string& detail) {
  const std::string what = detail.empty() ? "" : absl::StrCat(" (", detail, ")");
  constexpr char kRemedy[] = "create another cache and prefill it";
  switch (end) {
    case KvCacheEnd::kExpired:
      return KvFailure(StatusCode::kFailedPrecondition, "KV_EXPIRED",
                       absl::StrCat("the cache's lease has expired", what, "; ", kRemedy));
    case KvCacheEnd::kDeleted:
      return KvFailure(StatusCode::kFailedPrecondition, "KV_DELETED",
                       absl::StrCat("the cache was deleted", what, "; ", kRemedy));
    case KvCacheEnd::kLost:
      return KvFailure(StatusCode::kDataLoss, "KV_LOST",
                       absl::StrCat("a worker of the cache was lost", what, "; ", kRemedy));
    case KvCacheEnd::kRanksDiffer:
      return KvFailure(
          StatusCode::kDataLoss, "KV_RANKS_DIFFER",
          absl::StrCat("the cache's workers have different block tables", what, "; ", kRemedy));
    case KvCacheEnd::kInconsistent:
      return KvFailure(
          StatusCode::kDataLoss, "KV_INCONSISTENT",
          absl::StrCat("the cache's workers cannot agree on the last step", what, "; ", kRemedy));
  }
  return KvNotFound();
}

Failure KvFenced() {
  return KvFailure(StatusCode::kAborted, "KV_FENCED", "another writer has opened the cache");
}

Failure KvBlocksIndivisible(int64_t block_tokens, int position_parts) {
  return BadKvField(
      "spec.block_tokens",
      absl::StrCat("is ", block_tokens, "; ", position_parts,
                   " position parts cannot divide such a block into blocks of 16, 32, "
                   "64 or 128 entries: name another world_size or larger blocks, or "
                   "leave divide_blocks unset"));
}

Failure KvMemory(int64_t needed, int world_size, absl::Duration retry_after) {
  return RetryableKvFailure(StatusCode::kResourceExhausted, "KV_MEMORY",
                            absl::StrCat("the cache needs ", needed, " bytes on each of ",
                                         world_size, " workers; too few have room now"),
                            retry_after);
}

Failure KvNeverFits(int64_t needed, int world_size, int64_t largest) {
  return KvFailure(StatusCode::kResourceExhausted, "KV_MEMORY",
                   absl::StrCat("the cache needs ", needed, " bytes on each of ", world_size,
                                " workers; a worker's caches may take at most ", largest,
                                " bytes: use fewer blocks or more workers"));
}

Failure KvReserveRefused(const std::string& worker, const std::string& reason,
                         absl::Duration retry_after) {
  return RetryableKvFailure(StatusCode::kResourceExhausted, "KV_MEMORY",
                            absl::StrCat("worker ", worker, " cannot reserve the cache: ", reason),
                            retry_after);
}

Failure KvReserveMalformed(const std::string& worker, const std::string& reason) {
  return KvFailure(StatusCode::kInternal, "RESERVE_MALFORMED",
                   absl::StrCat("worker ", worker, " rejects the reservation: ", reason));
}

Failure KvUnsupported(const std::string& worker, const std::string& reason) {
  return KvFailure(StatusCode::kUnimplemented, "KV_UNSUPPORTED",
                   absl::StrCat("worker ", worker, " cannot serve the cache: ", reason));
}

Failure KvQuota(const std::string& client, int64_t held, int64_t wanted, int64_t limit) {
  return QuotaReached(StatusCode::kResourceExhausted, "KV_QUOTA", client,
                      absl::StrCat("max_kv_cache_bytes is ", limit, "; its caches take ", held,
                                   " bytes and this one would take ", wanted));
}

Failure KvClientHasTooManyCaches(const std::string& client, int64_t limit) {
  return QuotaReached(StatusCode::kResourceExhausted, "TOO_MANY_CACHES", client,
                      absl::StrCat("max_kv_caches is ", limit, "; it has as many caches"));
}

Failure TooManyKvCaches(int64_t caches, int64_t limit, absl::Duration retry_after) {
  return RetryableKvFailure(
      StatusCode::kResourceExhausted, "TOO_MANY_CACHES",
      absl::StrCat("the server has ", caches, " caches; max_kv_caches is ", limit), retry_after);
}

Failure KvSpecsTooLarge(int64_t limit, absl::Duration retry_after) {
  return RetryableKvFailure(
      StatusCode::kResourceExhausted, "TOO_MANY_CACHES",
      absl::StrCat("the specifications of all caches may take at most ", limit, " bytes"),
      retry_after);
}

Failure KvRequestIdReused() {
  return BadKvField("request_id", "another request with this id created a cache");
}

Failure KvWorkersMissing(int wanted, int connected, absl::Duration retry_after) {
  return RetryableKvFailure(StatusCode::kUnavailable, "WORKERS_MISSING",
                            absl::StrCat("the cache needs ", wanted, " workers; ", connected,
                                         " connected workers serve caches"),
                            retry_after);
}

Failure KvMemberMissing(const std::string& name) {
  Failure failure = KvFailure(
      StatusCode::kFailedPrecondition, "MEMBER_NOT_READY",
      absl::StrCat("members: worker ", name, " is not connected, leaves, or serves no caches"));
  failure.field = "members";
  return failure;
}

Failure KvReserveInterrupted(const std::string& worker, const std::string& why,
                             absl::Duration retry_after) {
  return RetryableKvFailure(StatusCode::kUnavailable, "WORKER_LOST",
                            absl::StrCat("worker ", worker, " did not reserve the cache: ", why),
                            retry_after);
}

Failure KvBusy(const std::string& worker, absl::Duration waited, absl::Duration retry_after) {
  return RetryableKvFailure(
      StatusCode::kUnavailable, "KV_BUSY",
      absl::StrCat("worker ", worker, " has not answered within ", absl::FormatDuration(waited),
                   "; it may compute a call of the earlier writer"),
      retry_after);
}

Failure KvNotYetAdopted(absl::Duration retry_after) {
  return RetryableKvFailure(
      StatusCode::kUnavailable, "KV_ADOPTING",
      "the coordinator has restarted; not all workers of the cache have joined again", retry_after);
}

Failure KvStepNotAnswered(uint64_t answered_step, uint64_t complete_step) {
  return BadKvField(
      "answered_step",
      absl::StrCat("is ", answered_step, "; the last step that every worker has completed is ",
                   complete_step));
}

Failure KvTransportUnavailable(const std::string& why) {
  return KvFailure(StatusCode::kFailedPrecondition, "TRANSPORT_UNAVAILABLE",
                   absl::StrCat("no accepted transport is available: ", why));
}

}  // namespace ringattn::server
