#include "server/edge/call/call_failures.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ringattn::server {
namespace {

Failure Make(absl::StatusCode code, const char* reason, std::string message,
             const char* field = "") {
  Failure failure;
  failure.code = code;
  failure.reason = reason;
  failure.message = std::move(message);
  failure.field = field;
  return failure;
}

}  // namespace

Failure LimitReached(ExhaustedLimit full, const Limits& limits, absl::Duration retry_after) {
  Failure failure = Make(absl::StatusCode::kResourceExhausted, "TOO_MANY_REQUESTS",
                         "the server has too many calls open");
  if (full == ExhaustedLimit::kClient) {
    failure.reason = "TOO_MANY_STREAMS";
    failure.message = absl::StrCat("this client has ", limits.max_streams_per_client,
                                   " calls open, the limit for one");
  } else if (full == ExhaustedLimit::kConnection) {
    failure.reason = "TOO_MANY_STREAMS";
    failure.message = absl::StrCat("this connection has ", limits.max_streams_per_connection,
                                   " calls open, the limit for one");
  }
  failure.retry_after = retry_after;
  return failure;
}

Failure Evicted(const Limits& limits, absl::Duration retry_after) {
  Failure failure = Make(absl::StatusCode::kResourceExhausted, "TOO_MANY_WITHOUT_HEADER",
                         absl::StrCat("more than ", limits.max_streams_without_header,
                                      " calls are open without a header, and this was the oldest"),
                         "header");
  failure.retry_after = retry_after;
  return failure;
}

Failure ServerEnds(absl::Duration retry_after) {
  Failure failure =
      Make(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
  failure.retry_after = retry_after;
  return failure;
}

Failure TooManyCallsStreams(int64_t max_per_client, absl::Duration retry_after) {
  Failure failure =
      Make(absl::StatusCode::kResourceExhausted, "TOO_MANY_STREAMS",
           absl::StrCat("this client has ", max_per_client, " Calls streams, the limit for one"));
  failure.retry_after = retry_after;
  return failure;
}

Failure CoreBusy(absl::Duration retry_after) {
  Failure failure =
      Make(absl::StatusCode::kUnavailable, "BUSY", "the server is busy or shutting down");
  failure.retry_after = retry_after;
  return failure;
}

Failure HeaderMissing() {
  return Make(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST",
              "the stream ended before its header", "header");
}

Failure HeaderLate(absl::Duration limit) {
  return Make(absl::StatusCode::kDeadlineExceeded, "HEADER_TIMEOUT",
              absl::StrCat("no header arrived within ", absl::FormatDuration(limit)), "header");
}

Failure HeaderTooLarge(int64_t bytes, int64_t limit) {
  return Make(absl::StatusCode::kResourceExhausted, "OVER_LIMIT",
              absl::StrCat("the header has ", bytes, " bytes, the limit is ", limit), "header");
}

Failure UploadTooSlow(const Limits& limits) {
  return Make(
      absl::StatusCode::kDeadlineExceeded, "UPLOAD_TOO_SLOW",
      absl::StrCat("tensor bytes arrived more slowly than ", limits.min_upload_bytes_per_second,
                   " a second for longer than ", absl::FormatDuration(limits.upload_grace),
                   ", or than ", absl::FormatDuration(limits.upload_grace_contended),
                   " while other requests waited"));
}

Failure BadOutputs(const absl::Status& status) {
  return Make(absl::StatusCode::kInternal, "BAD_OUTPUTS",
              absl::StrCat("the worker ", status.message()));
}

Failure DeadlinePassed() {
  return Make(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
              "the call's deadline passed");
}

Failure CancelledByClient() {
  return Make(absl::StatusCode::kCancelled, "CANCELLED", "the client cancelled or went away");
}

Failure WritersDiffer(int index) {
  return Make(absl::StatusCode::kInvalidArgument, "WRITERS_DIFFER",
              absl::StrCat("the header of writer ", index,
                           " differs from those of the other writers; all fields must be equal but "
                           "transport and the chunk and progress options of reply, and so must "
                           "transport.writer.count"),
              "transport.writer");
}

Failure WriterLost(int index, const std::string& why) {
  return Make(absl::StatusCode::kAborted, "WRITER_LOST",
              absl::StrCat("writer ", index, " left the request: ", why));
}

Failure WriterReplaced(int index) {
  return Make(absl::StatusCode::kAborted, "WRITER_REPLACED",
              absl::StrCat("a later stream joined the request as writer ", index,
                           "; each index must belong to one client"));
}

Failure WriterMissing(const std::vector<int>& indices, int count, absl::Duration limit) {
  return Make(absl::StatusCode::kDeadlineExceeded, "WRITER_MISSING",
              absl::StrCat("of ", count, " writers, ", absl::StrJoin(indices, ", "),
                           " did not join within ", absl::FormatDuration(limit)));
}

}  // namespace ringattn::server
