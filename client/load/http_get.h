// HTTP GET over libcurl, for scraping metrics.
// Tests: metrics_collector_test.cc.
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
  std::string path;  // from "/" on, with the query

  std::string ToString() const;
};

// Parses "http://host[:port][/path]". The port defaults to 80 and the path to /metrics. Returns
// INVALID_ARGUMENT with the reason for any other text, https included.
absl::StatusOr<HttpUrl> ParseHttpUrl(absl::string_view text);

inline constexpr size_t kMaxPageBytes = 16 << 20;

// Returns the page's body. Blocks for at most `timeout`. Uses no proxy and follows no redirection.
// Errors, each with the URL: UNAVAILABLE if the connection fails or breaks; DEADLINE_EXCEEDED;
// FAILED_PRECONDITION for a status other than 200; RESOURCE_EXHAUSTED beyond kMaxPageBytes.
// Thread safe.
absl::StatusOr<std::string> HttpGet(const HttpUrl& url, absl::Duration timeout);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_HTTP_GET_H_
