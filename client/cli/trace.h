// A call's timeline in the Chrome trace format, which chrome://tracing and
// ui.perfetto.dev show: the client, the coordinator's stages, and every rank.
#ifndef RINGATTN_CLIENT_CLI_TRACE_H_
#define RINGATTN_CLIENT_CLI_TRACE_H_

#include <string>

#include "absl/status/status.h"
#include "client/call.h"
#include "client/cli/command.h"

namespace ringattn::client::cli {

// Times are microseconds since the successful attempt began. Ranks report theirs
// since the server accepted; they are shifted by when the client saw that. A call in
// several streams: since the first of them began, each with rows of its own.
Json TraceJson(const CallReport& report);

// Errors: the system's, naming the file.
absl::Status WriteTrace(const std::string& path, const CallReport& report);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_TRACE_H_
