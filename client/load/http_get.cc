#include "client/load/http_get.h"

#include <curl/curl.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ringattn::client::load {
namespace {

constexpr char kDefaultPath[] = "/metrics";

struct CurlDeleter {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
  void operator()(CURLU* url) const { curl_url_cleanup(url); }
  void operator()(char* text) const { curl_free(text); }
};

// A part of the URL; empty if the URL does not have it.
std::string UrlPart(CURLU* url, CURLUPart part) {
  char* text = nullptr;
  if (curl_url_get(url, part, &text, 0) != CURLUE_OK) return "";
  const std::unique_ptr<char, CurlDeleter> owned(text);
  return owned.get();
}

struct Page {
  std::string body;
  bool too_large = false;
};

// CURLOPT_WRITEFUNCTION. A return value other than the number of bytes ends the transfer.
size_t Append(char* data, size_t size, size_t count, void* target) {
  Page& page = *static_cast<Page*>(target);
  const size_t bytes = size * count;
  page.too_large = bytes > kMaxPageBytes - page.body.size();
  if (page.too_large) return bytes + 1;
  page.body.append(data, bytes);
  return bytes;
}

void InitialiseCurlOnce() {
  static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
  static_cast<void>(initialised);
}

// The system's reason if there is one, otherwise curl's.
std::string ReasonOf(CURL* handle, CURLcode code, const char* message) {
  long os_error = 0;
  curl_easy_getinfo(handle, CURLINFO_OS_ERRNO, &os_error);
  if (code == CURLE_COULDNT_CONNECT && os_error != 0) {
    return std::strerror(static_cast<int>(os_error));
  }
  return message[0] != '\0' ? message : curl_easy_strerror(code);
}

absl::Status TransferError(const HttpUrl& url, CURLcode code, const std::string& reason) {
  const std::string detail = absl::StrCat(url.ToString(), ": ", reason);
  return code == CURLE_OPERATION_TIMEDOUT ? absl::DeadlineExceededError(detail)
                                          : absl::UnavailableError(detail);
}

}  // namespace

std::string HttpUrl::ToString() const {
  const bool brackets = absl::StrContains(host, ':');
  return absl::StrCat("http://", brackets ? "[" : "", host, brackets ? "]" : "", ":", port, path);
}

absl::StatusOr<HttpUrl> ParseHttpUrl(absl::string_view text) {
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" ", why, "; give http://host[:port][/path]"));
  };
  if (absl::StartsWith(text, "https://")) return invalid("is https; only http is supported");
  if (!absl::StartsWith(text, "http://")) return invalid("is not an http:// URL");
  const auto is_blank = [](char letter) { return letter <= ' ' || letter == 0x7f; };
  if (std::any_of(text.begin(), text.end(), is_blank)) return invalid("contains a blank");
  const std::unique_ptr<CURLU, CurlDeleter> parsed(curl_url());
  const CURLUcode code = curl_url_set(parsed.get(), CURLUPART_URL, std::string(text).c_str(), 0);
  switch (code) {
    case CURLUE_OK:
      break;
    case CURLUE_NO_HOST:
      return invalid("has no host");
    case CURLUE_BAD_PORT_NUMBER:
      return invalid("has an invalid port; a port is in 1..65535");
    case CURLUE_BAD_IPV6:
      return invalid("has an invalid address in brackets");
    default:
      return invalid(absl::StrCat("is not a valid URL (", curl_url_strerror(code), ")"));
  }
  if (!UrlPart(parsed.get(), CURLUPART_USER).empty()) return invalid("has a user");
  HttpUrl url{.host = UrlPart(parsed.get(), CURLUPART_HOST),
              .port = UrlPart(parsed.get(), CURLUPART_PORT),
              .path = UrlPart(parsed.get(), CURLUPART_PATH)};
  if (url.host.empty()) return invalid("has no host");
  if (url.host.front() == '[') url.host = url.host.substr(1, url.host.size() - 2);
  if (url.port.empty()) url.port = "80";
  if (url.port == "0") return invalid("has port 0; a port is in 1..65535");
  const size_t authority_end = text.find('/', std::strlen("http://"));
  if (authority_end == absl::string_view::npos) url.path = kDefaultPath;
  const std::string query = UrlPart(parsed.get(), CURLUPART_QUERY);
  if (!query.empty()) absl::StrAppend(&url.path, "?", query);
  return url;
}

absl::StatusOr<std::string> HttpGet(const HttpUrl& url, absl::Duration timeout) {
  InitialiseCurlOnce();
  const std::unique_ptr<CURL, CurlDeleter> handle(curl_easy_init());
  if (handle == nullptr) return absl::ResourceExhaustedError("curl_easy_init failed");
  const std::string address = url.ToString();
  const auto milliseconds = std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 1, INT32_MAX);
  char message[CURL_ERROR_SIZE] = "";
  Page page;
  curl_easy_setopt(handle.get(), CURLOPT_URL, address.c_str());
  curl_easy_setopt(handle.get(), CURLOPT_PROTOCOLS_STR, "http");
  curl_easy_setopt(handle.get(), CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);
  curl_easy_setopt(handle.get(), CURLOPT_NOPROXY, "*");
  curl_easy_setopt(handle.get(), CURLOPT_NOSIGNAL, 1L);  // for use on several threads
  curl_easy_setopt(handle.get(), CURLOPT_TIMEOUT_MS, static_cast<long>(milliseconds));
  curl_easy_setopt(handle.get(), CURLOPT_ERRORBUFFER, message);
  curl_easy_setopt(handle.get(), CURLOPT_WRITEFUNCTION, Append);
  curl_easy_setopt(handle.get(), CURLOPT_WRITEDATA, &page);
  const CURLcode code = curl_easy_perform(handle.get());
  if (page.too_large) {
    return absl::ResourceExhaustedError(
        absl::StrCat(address, ": the page has more than ", kMaxPageBytes, " bytes"));
  }
  if (code != CURLE_OK) return TransferError(url, code, ReasonOf(handle.get(), code, message));
  long status = 0;
  curl_easy_getinfo(handle.get(), CURLINFO_RESPONSE_CODE, &status);
  if (status != 200) {
    return absl::FailedPreconditionError(absl::StrCat(address, ": HTTP status ", status));
  }
  return std::move(page.body);
}

}  // namespace ringattn::client::load
