// A call's timeline in the Chrome trace format for chrome://tracing and ui.perfetto.dev: the
// client, the coordinator's stages, and every rank.
// Tests: trace_test.cc.
#ifndef RINGATTN_CLIENT_CLI_TRACE_H_
#define RINGATTN_CLIENT_CLI_TRACE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/cli/command.h"

namespace ringattn::client::cli {

// Times are microseconds since the successful attempt began. Ranks report times since the server
// accepted the request; these are shifted by the moment at which the client received Accepted.
Json TraceJson(const CallReport& report);

// The output file of a timeline. It is opened before the call, so that an unwritable path fails
// early. Not thread safe.
class TraceFile {
 public:
  // An empty path means no file: Write does nothing. The file keeps its content until Write.
  // Errors: the system's, naming the file.
  static absl::StatusOr<TraceFile> Open(const std::string& path);

  TraceFile(TraceFile&& other) noexcept;
  TraceFile& operator=(TraceFile&&) = delete;
  ~TraceFile();  // removes a file that Open created but Write did not fill

  absl::Status Write(const CallReport& report);

 private:
  TraceFile() = default;

  std::string path_;
  int descriptor_ = -1;
  bool made_ = false;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_TRACE_H_
