#include "common/observability/http_server.h"

#include <civetweb.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Time for a connection's whole request, during which it occupies a thread. With the library's
// defaults (30 s, few threads) a few silent connections block all others.
constexpr char kRequestTimeoutMs[] = "500";
constexpr char kThreads[] = "16";  // mostly idle

// Permits only scripts, styles and data of this server; no forms, frames, plug-ins or other hosts.
constexpr char kSecurityHeaders[] =
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Cache-Control: no-store\r\n";

const char* Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 503:
      return "Service Unavailable";
    default:
      return "Error";
  }
}

// Where to keep the first message of a mg_start() on this thread; null: nowhere.
thread_local std::string* start_error = nullptr;

int KeepStartError(const mg_connection*, const char* message) {
  if (start_error == nullptr) return 0;  // civetweb logs it
  if (start_error->empty()) *start_error = message;
  return 1;
}

}  // namespace

HttpServer::HttpServer(HttpRoutes routes) : routes_(std::move(routes)) {}

HttpServer::~HttpServer() {
  if (context_ == nullptr) return;
  mg_stop(context_);
  mg_exit_library();
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& listen,
                                                              HttpRoutes routes) {
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(routes)));
  const char* options[] = {
      "listening_ports", listen.c_str(),      "num_threads", kThreads, "request_timeout_ms",
      kRequestTimeoutMs, "enable_keep_alive", "no",          nullptr};
  mg_callbacks callbacks = {};
  callbacks.begin_request = &HttpServer::OnRequest;
  mg_init_library(0);
  std::string why;
  start_error = &why;
  callbacks.log_message = &KeepStartError;
  server->context_ = mg_start(&callbacks, server.get(), options);
  start_error = nullptr;
  if (server->context_ == nullptr) {
    mg_exit_library();
    return absl::UnavailableError(absl::StrCat("HTTP: cannot listen on ", listen, ": ", why));
  }
  mg_server_port port = {};
  if (mg_get_server_ports(server->context_, 1, &port) < 1) {
    return absl::UnavailableError(absl::StrCat("HTTP: no port at ", listen));
  }
  server->address_ = absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port.port);
  return server;
}

HttpReply HttpServer::Answer(const std::string& method, const std::string& path) const {
  const auto route = routes_.find(path);
  if (route == routes_.end()) return {.status = 404, .body = "not found\n"};
  if (method != "GET" && method != "HEAD") return {.status = 405, .body = "GET only\n"};
  return route->second();
}

int HttpServer::OnRequest(mg_connection* connection) {
  const auto* server = static_cast<const HttpServer*>(mg_get_user_data(mg_get_context(connection)));
  const mg_request_info* request = mg_get_request_info(connection);
  const std::string method = request->request_method;
  const HttpReply reply =
      server->Answer(method, request->local_uri == nullptr ? "" : request->local_uri);
  const std::string head = absl::StrCat("HTTP/1.1 ", reply.status, " ", Reason(reply.status),
                                        "\r\nContent-Type: ", reply.content_type,
                                        "\r\nContent-Length: ", reply.body.size(), "\r\n",
                                        reply.status == 405 ? "Allow: GET, HEAD\r\n" : "",
                                        kSecurityHeaders, "Connection: close\r\n\r\n");
  mg_write(connection, head.data(), head.size());
  if (method != "HEAD") mg_write(connection, reply.body.data(), reply.body.size());
  return reply.status;  // a non-zero status means that the request is finished
}

}  // namespace ringattn
