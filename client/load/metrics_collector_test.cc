#include "client/load/metrics_collector.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/observability/http_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Optional;

TEST(HttpUrl, HasDefaultsAndExplainsErrors) {
  EXPECT_EQ(ParseHttpUrl("http://a.b:7702/x/y")->ToString(), "http://a.b:7702/x/y");
  EXPECT_EQ(ParseHttpUrl("http://a.b:7702")->ToString(), "http://a.b:7702/metrics");
  EXPECT_EQ(ParseHttpUrl("http://a")->ToString(), "http://a:80/metrics");
  EXPECT_EQ(ParseHttpUrl("http://[::1]:9/m")->ToString(), "http://[::1]:9/m");
  EXPECT_EQ(ParseHttpUrl("http://[::1]")->host, "::1");
  for (const auto& [text, why] :
       std::vector<std::pair<std::string, std::string>>{{"", "is not an http:// URL"},
                                                        {"localhost:7702", "is not an http:// URL"},
                                                        {"https://a/metrics", "only http"},
                                                        {"http://", "no host"},
                                                        {"http://:80", "no host"},
                                                        {"http://a:0", "port"},
                                                        {"http://a:70000", "port"},
                                                        {"http://a:x", "port"},
                                                        {"http://u@a", "user"},
                                                        {"http://[::1", "bracket"},
                                                        {"http://a/b c", "blank"},
                                                        {"http://a/\r\nX: y", "blank"}}) {
    EXPECT_THAT(std::string(ParseHttpUrl(text).status().message()), HasSubstr(why)) << text;
  }
}

TEST(PrometheusText, SamplesWithTheirLabels) {
  const auto samples = ParsePrometheusText(
      "# HELP a what\n# TYPE a counter\na 1\nb{x=\"y\"} 2.5e3 1700000000\r\n"
      "c{p=\"a\\\"b\\\\c\\nd,}\",q=\"\",} NaN\n\nd{} +Inf\n");
  ASSERT_TRUE(samples.ok()) << samples.status();
  ASSERT_EQ(samples->size(), 4u);
  EXPECT_EQ((*samples)[0].name, "a");
  EXPECT_EQ((*samples)[0].value, 1);
  EXPECT_EQ((*samples)[1].labels.at("x"), "y");
  EXPECT_EQ((*samples)[1].value, 2500);
  EXPECT_EQ((*samples)[2].labels.at("p"), "a\"b\\c\nd,}");
  EXPECT_EQ((*samples)[2].labels.at("q"), "");
  for (const char* text :
       {"<html>", "a", "a{x=\"y\" 1", "a{x=y} 1", "a one", "a{x=\"y} 1", "{} 1", "a 1 2 3"}) {
    EXPECT_EQ(ParsePrometheusText(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

constexpr Figure kFigures[] = {
    {"grows", FigureKind::kRate, "total", "way", "up"},
    {"all", FigureKind::kRate, "total"},
    {"mean", FigureKind::kAverage, "level"},
    {"most", FigureKind::kMaximum, "level"},
    {"none", FigureKind::kRate, "absent"},
};

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

Scrape Of(double at, double up, double down, double level) {
  const std::vector<MetricSample> samples = {
      {"total", {{"way", "up"}}, up}, {"total", {{"way", "down"}}, down}, {"level", {}, level}};
  return ScrapeOf(kFigures, samples, At(at));
}

TEST(SummariseScrapes, RatesUseTheLastScrapeBeforeTheSpan) {
  const std::vector<Scrape> scrapes = {Of(0, 0, 0, 100), Of(9, 90, 1, 50), Of(11, 110, 2, 1),
                                       Of(14, 200, 3, 3), Of(21, 900, 4, 70)};
  const auto summary = SummariseScrapes(kFigures, scrapes, At(10), At(20));
  EXPECT_THAT(summary[0], Optional(22.0));  // from 9 to 14 seconds
  EXPECT_THAT(summary[1], Optional(22.4));
  EXPECT_THAT(summary[2], Optional(2.0));
  EXPECT_THAT(summary[3], Optional(3.0));
  EXPECT_EQ(summary[4], std::nullopt);
}

TEST(SummariseScrapes, TooFewScrapesGiveNoValue) {
  const auto one = SummariseScrapes(kFigures, {Of(15, 1, 1, 5)}, At(10), At(20));
  EXPECT_EQ(one[0], std::nullopt);
  EXPECT_THAT(one[2], Optional(5.0));
  EXPECT_EQ(SummariseScrapes(kFigures, {}, At(10), At(20))[3], std::nullopt);
}

TEST(SummariseScrapes, ARestartedCounterCountsFromZero) {
  const std::vector<Scrape> scrapes = {Of(10, 100, 0, 0), Of(12, 140, 0, 0), Of(14, 10, 0, 0),
                                       Of(20, 20, 0, 0)};
  EXPECT_THAT(SummariseScrapes(kFigures, scrapes, At(10), At(20))[0], Optional(6.0));
}

TEST(MetricsCollector, ScrapesUntilItsDestruction) {
  std::atomic<int> asked{0};
  auto server = HttpServer::Start("127.0.0.1:0", {{"/metrics", [&] {
                                                     const int n = ++asked;
                                                     HttpReply reply;
                                                     reply.body =
                                                         absl::StrCat("total ", n, "\nlevel 7\n");
                                                     return reply;
                                                   }}});
  ASSERT_TRUE(server.ok());
  const HttpUrl url = *ParseHttpUrl(absl::StrCat("http://", (*server)->address()));
  // Nobody listens on port 1 of loopback.
  const HttpUrl nobody = *ParseHttpUrl("http://127.0.0.1:1");
  const std::vector<Figure> figures(std::begin(kFigures), std::end(kFigures));
  const absl::Time begin = absl::Now();
  {
    MetricsCollector collector({{url, figures}, {nobody, figures}}, absl::Milliseconds(10));
    while (asked < 5) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Milliseconds(50));
    const std::vector<ScrapedFigures> both = collector.Between(begin, absl::Now());
    EXPECT_GE(both[0].scrapes, 5);
    EXPECT_EQ(both[0].failed, 0);
    EXPECT_GT(*both[0].values[1], 0);
    EXPECT_THAT(both[0].values[3], Optional(7.0));
    EXPECT_EQ(both[1].scrapes, 0);
    EXPECT_GE(both[1].failed, 1);
    EXPECT_THAT(both[1].last_failure, HasSubstr("http://127.0.0.1:1/metrics: Connection refused"));
    EXPECT_EQ(both[1].values[3], std::nullopt);
  }
  const int at_the_end = asked;
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(asked, at_the_end);
}

TEST(FetchMetrics, FailuresAreTyped) {
  auto server = HttpServer::Start("127.0.0.1:0",
                                  {{"/html", [] { return HttpReply{.body = "<html></html>"}; }}});
  ASSERT_TRUE(server.ok());
  const auto fetch = [&](absl::string_view url) {
    return FetchMetrics(*ParseHttpUrl(url), absl::Seconds(2)).status();
  };
  const std::string address = (*server)->address();
  EXPECT_EQ(fetch("http://127.0.0.1:1").code(), absl::StatusCode::kUnavailable);
  const absl::Status missing = fetch(absl::StrCat("http://", address, "/metrics"));
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("404"));
  const absl::Status html = fetch(absl::StrCat("http://", address, "/html"));
  EXPECT_EQ(html.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(html.message()), HasSubstr("<html>"));
  EXPECT_EQ(fetch("http://no-such-name.invalid").code(), absl::StatusCode::kUnavailable);
}

TEST(HttpGet, ASilentServerTimesOut) {
  // A listener that never accepts: the kernel connects, but no byte arrives.
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const auto url = ParseHttpUrl(absl::StrCat("http://127.0.0.1:", ntohs(address.sin_port)));
  const absl::Time begun = absl::Now();
  EXPECT_EQ(HttpGet(*url, absl::Milliseconds(100)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - begun, absl::Seconds(5));
  close(listener);
}

}  // namespace
}  // namespace ringattn::client::load
