// HttpServer: a handful of read-only pages for operators and scrapers, on one port.
//
//   auto server = HttpServer::Start("127.0.0.1:0", {{"/metrics", [] { return HttpReply{...}; }}});
//
// GET and HEAD of the paths it was given, exactly; anything else is 404 or 405. Bodies of
// requests are not read, files are not served, and every reply tells browsers not to run,
// frame, guess at or keep anything.
#ifndef RINGATTN_COMMON_OBSERVABILITY_HTTP_SERVER_H_
#define RINGATTN_COMMON_OBSERVABILITY_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

struct mg_context;
struct mg_connection;

namespace ringattn {

struct HttpReply {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
};

// Called on the server's threads, several at a time. What they take is the time that a
// scrape takes: no more than moments.
using HttpRoutes = std::map<std::string, std::function<HttpReply()>>;  // by path

// Thread safe.
class HttpServer {
 public:
  // At "host:port"; port 0 picks a free one. UNAVAILABLE if it cannot bind.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& listen,
                                                           HttpRoutes routes);
  ~HttpServer();  // waits for what is being answered

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // As bound.
  const std::string& address() const { return address_; }

 private:
  explicit HttpServer(HttpRoutes routes);

  static int OnRequest(mg_connection* connection);
  HttpReply Answer(const std::string& method, const std::string& path) const;

  const HttpRoutes routes_;
  std::string address_;
  mg_context* context_ = nullptr;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_OBSERVABILITY_HTTP_SERVER_H_
