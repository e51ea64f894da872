#include "common/observability/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

int Connect(const std::string& address) {
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(port);
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  return fd;
}

std::string Say(const std::string& address, const std::string& request) {
  const int fd = Connect(address);
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string reply;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) reply.append(buffer, n);
  close(fd);
  return reply;
}

// All cases share one server, because stopping a server takes two seconds.
class HttpServerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto server = HttpServer::Start(
        "127.0.0.1:0", {{"/page",
                         [] {
                           ++asked_;
                           return HttpReply{.content_type = "text/html", .body = "<p>hello</p>"};
                         }},
                        {"/busy", [] { return HttpReply{.status = 503, .body = "not now\n"}; }}});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  static void TearDownTestSuite() { server_.reset(); }

  HttpServerTest() { asked_ = 0; }

  static std::string Ask(const std::string& method, const std::string& path) {
    return Say(server_->address(), absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: a\r\n\r\n"));
  }

  static inline std::atomic<int> asked_ = 0;
  static inline std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersWhatItWasGiven) {
  const std::string reply = Ask("GET", "/page");
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(reply, HasSubstr("Content-Type: text/html\r\n"));
  EXPECT_THAT(reply, HasSubstr("Content-Length: 12\r\n"));
  EXPECT_THAT(reply, EndsWith("\r\n\r\n<p>hello</p>"));
  EXPECT_THAT(Ask("GET", "/page?cache=1"), EndsWith("<p>hello</p>"));
  EXPECT_THAT(Ask("GET", "/busy"), StartsWith("HTTP/1.1 503 "));
  EXPECT_EQ(asked_, 2);
}

TEST_F(HttpServerTest, HeadSaysHowLongAndNoMore) {
  const std::string reply = Ask("HEAD", "/page");
  EXPECT_THAT(reply, HasSubstr("Content-Length: 12\r\n"));
  EXPECT_THAT(reply, EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, EverythingElseIsRefused) {
  for (const char* path : {"/", "/page/", "/pag", "/other", "/../page/x", "/%2e%2e/etc/passwd"}) {
    EXPECT_THAT(Ask("GET", path), Not(HasSubstr("hello"))) << path;
  }
  EXPECT_THAT(Ask("GET", "/etc/passwd"), StartsWith("HTTP/1.1 404 Not Found\r\n"));
  EXPECT_THAT(Ask("POST", "/page"), StartsWith("HTTP/1.1 405 Method Not Allowed\r\n"));
  EXPECT_THAT(Ask("POST", "/page"), HasSubstr("Allow: GET, HEAD\r\n"));
  for (const char* method : {"PUT", "DELETE", "OPTIONS"}) {
    EXPECT_THAT(Ask(method, "/page"), Not(HasSubstr("hello"))) << method;
  }
  EXPECT_EQ(asked_, 0);
}

TEST_F(HttpServerTest, EveryReplyTellsBrowsersWhatNotToDo) {
  for (const char* path : {"/page", "/busy", "/other"}) {
    const std::string reply = Ask("GET", path);
    EXPECT_THAT(reply, HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'self'"));
    EXPECT_THAT(reply, HasSubstr("frame-ancestors 'none'"));
    EXPECT_THAT(reply, Not(HasSubstr("unsafe")));
    EXPECT_THAT(reply, HasSubstr("X-Content-Type-Options: nosniff\r\n"));
    EXPECT_THAT(reply, HasSubstr("Cache-Control: no-store\r\n"));
  }
}

TEST_F(HttpServerTest, WhatIsNoHttpIsNotAnswered) {
  EXPECT_THAT(Say(server_->address(), "\x16\x03\x01 what\r\n\r\n"), Not(HasSubstr("hello")));
  EXPECT_THAT(Say(server_->address(),
                  "GET /page HTTP/1.1\r\nX: " + std::string(64 << 10, 'x') + "\r\n\r\n"),
              Not(HasSubstr("hello")));
}

TEST_F(HttpServerTest, ConnectionsThatSayHalfARequestBlockNobody) {
  std::vector<int> silent;
  for (int i = 0; i < 40; ++i) {
    silent.push_back(Connect(server_->address()));
    EXPECT_EQ(write(silent.back(), "GET /pa", 7), 7);
  }
  const absl::Time start = absl::Now();
  EXPECT_THAT(Ask("GET", "/page"), HasSubstr("200 OK"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  for (const int fd : silent) close(fd);
}

TEST_F(HttpServerTest, ATakenPortIsAnError) {
  const absl::Status status = HttpServer::Start(server_->address(), {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Address already in use"));
}

}  // namespace
}  // namespace ringattn
