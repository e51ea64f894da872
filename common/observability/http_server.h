// HttpServer: a few read-only pages for operators and scrapers, on one port.
//
//   auto server = HttpServer::Start("127.0.0.1:0", {{"/metrics", [] { return HttpReply{...}; }}});
//
// Serves GET and HEAD of exactly the given paths; other requests get 404 or 405. It reads no
// request bodies and serves no files. Every reply forbids browsers to run, frame, sniff or cache
// content.
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

// Handlers run concurrently on the server's threads. A scrape lasts as long as its handler, so
// handlers should return quickly.
using HttpRoutes = std::map<std::string, std::function<HttpReply()>>;  // by path

// Thread safe.
class HttpServer {
 public:
  // Listens at "host:port"; port 0 picks a free one. Returns UNAVAILABLE if it cannot bind.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& listen,
                                                           HttpRoutes routes);
  ~HttpServer();  // waits for running handlers

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Returns "host:port" as bound.
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
