// The work per small request must not grow with the queue. Counts steps (CoordinatorStats), not
// time.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/core/testing/scenario_driver.h"

namespace ringattn::server {
namespace {

CoordinatorConfig ManyQueued() {
  CoordinatorConfig config;
  config.limits.max_queued_requests = config.limits.max_queued_requests_per_client = 4096;
  return config;
}

// Serves small requests in order of arrival while a constant number waits.
class SmallRequests {
 public:
  // `client`: the client of the request with this number.
  explicit SmallRequests(std::function<std::string(int64_t number)> client)
      : driver_(ManyQueued()), client_(std::move(client)) {
    driver_.Run("join a flops=1e9");
    driver_.Run("wait 300ms");
  }

  ScenarioDriver& driver() { return driver_; }

  void Send(int64_t count) {
    for (const int64_t last = sent_ + count; sent_ < last;) {
      ++sent_;
      driver_.Run(absl::StrCat("request s", sent_, " inline=x client=", client_(sent_)));
    }
  }

  // Returns the steps per request of serving `count` requests, each of which is followed by another
  // one.
  double StepsToServe(int64_t count) {
    const int64_t before = Steps();
    for (int64_t i = 0; i < count; ++i) {
      ++served_;
      const ScenarioLines lines =
          driver_.Run(absl::StrCat("a finished 1-", first_ + served_, " output=y"));
      EXPECT_GT(lines.size(), 3u) << "operation " << first_ + served_ << " did not run";
      Send(1);
    }
    return static_cast<double>(Steps() - before) / static_cast<double>(count);
  }

  // The number of the operation before the first small one.
  void set_first(int64_t number) { first_ = number; }

 private:
  int64_t Steps() { return std::atoll(driver_.Run("steps")[0].second.c_str()); }

  ScenarioDriver driver_;
  const std::function<std::string(int64_t number)> client_;
  int64_t sent_ = 0, served_ = 0, first_ = 0;
};

// Returns the steps per request while so many wait.
double StepsPerRequest(int64_t waiting, std::function<std::string(int64_t number)> client) {
  SmallRequests requests(std::move(client));
  requests.Send(waiting);
  return requests.StepsToServe(100);
}

TEST(QueueWork, DoesNotGrowWithTheQueueOfAClient) {
  const auto one = [](int64_t) { return std::string("one"); };
  EXPECT_LE(StepsPerRequest(10, one), 8);
  EXPECT_LE(StepsPerRequest(1000, one), 8);
}

TEST(QueueWork, DoesNotGrowWithTheNumberOfClients) {
  const auto own = [](int64_t number) { return absl::StrCat("client-", number); };
  EXPECT_LE(StepsPerRequest(10, own), 8);
  EXPECT_LE(StepsPerRequest(1000, own), 8);
}

// A large request computes, so that small ones may take express slots. Their client holds one.
TEST(QueueWork, DoesNotGrowNextToALargeRequest) {
  for (const int64_t waiting : {10, 1000}) {
    SmallRequests requests([](int64_t) { return std::string("small"); });
    requests.driver().Run("running large tokens=10000 client=large");
    requests.set_first(1);
    requests.Send(waiting);
    EXPECT_LE(requests.StepsToServe(100), 8) << waiting;
  }
}

}  // namespace
}  // namespace ringattn::server
