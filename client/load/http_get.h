// A page of a plain HTTP server, as scrapers fetch it.
#ifndef RINGATTN_CLIENT_LOAD_HTTP_GET_H_
#define RINGATTN_CLIENT_LOAD_HTTP_GET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn::client::load {

struct HttpUrl {
  std::string host;  // a name or an address, without brackets
  std::string port;
  std::string path;  // from "/" on

  std::string ToString() const;
};

// Of "http://host[:port][/path]", port 80 and path /metrics unless given. INVALID_ARGUMENT, saying
// why: for anything else, https among it.
absl::StatusOr<HttpUrl> ParseHttpUrl(absl::string_view text);

inline constexpr size_t kMaxPageBytes = 16 << 20;

// The page's body. Blocks for no more than `timeout` beside the name's resolution. Errors:
// UNAVAILABLE: no connection, or it broke; DEADLINE_EXCEEDED; FAILED_PRECONDITION: another status
// than 200; RESOURCE_EXHAUSTED: over kMaxPageBytes. All name the URL.
absl::StatusOr<std::string> HttpGet(const HttpUrl& url, absl::Duration timeout);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_HTTP_GET_H_
