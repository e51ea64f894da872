#include "common/observability/metrics.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::HasSubstr;

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

std::string Fetch(const std::string& address) {
  const int fd = Connect(address);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string reply;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) reply.append(buffer, n);
  close(fd);
  return reply;
}

TEST(MetricsTest, ServesWhatWasCounted) {
  Metrics metrics;
  metrics.Counters("ringattn_requests_total", "Requests that ended.")
      .Add({{"code", "OK"}})
      .Increment(3);
  StageDurations(metrics).Add({{"stage", "queue"}}, StageBuckets()).Observe(0.5);
  const absl::StatusOr<std::string> address = metrics.Serve("127.0.0.1:0");
  ASSERT_TRUE(address.ok()) << address.status();
  const std::string reply = Fetch(*address);
  EXPECT_THAT(reply, HasSubstr("200 OK"));
  EXPECT_THAT(reply, HasSubstr("ringattn_requests_total{code=\"OK\"} 3"));
  EXPECT_THAT(reply, HasSubstr("ringattn_stage_duration_seconds_count{stage=\"queue\"} 1"));
}

// With the library's default settings two such connections block all others for 30 s.
TEST(MetricsTest, ConnectionsThatSayHalfARequestBlockNobody) {
  Metrics metrics;
  metrics.Counters("ringattn_requests_total", "Requests that ended.").Add({}).Increment();
  const absl::StatusOr<std::string> address = metrics.Serve("127.0.0.1:0");
  ASSERT_TRUE(address.ok()) << address.status();
  std::vector<int> silent;
  for (int i = 0; i < 40; ++i) {
    silent.push_back(Connect(*address));
    EXPECT_EQ(write(silent.back(), "GET /met", 8), 8);
  }
  const absl::Time start = absl::Now();
  EXPECT_THAT(Fetch(*address), HasSubstr("200 OK"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  for (const int fd : silent) close(fd);
}

TEST(MetricsTest, TakenPortIsAnError) {
  Metrics first, second;
  const absl::StatusOr<std::string> address = first.Serve("127.0.0.1:0");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(second.Serve(*address).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ringattn
