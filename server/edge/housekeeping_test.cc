#include "server/edge/housekeeping.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/process/descriptors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using ::testing::HasSubstr;

// Allocates 300 MB in pieces of gRPC's size and frees all but every hundredth, so that no arena can
// shrink.
std::vector<std::unique_ptr<char[]>> Burst() {
  std::vector<std::unique_ptr<char[]>> kept;
  std::vector<std::unique_ptr<char[]>> freed;
  for (int i = 0; i < 37'500; ++i) {
    auto piece = std::make_unique<char[]>(8000);
    std::memset(piece.get(), 1, 8000);
    (i % 100 == 0 ? kept : freed).push_back(std::move(piece));
  }
  return kept;
}

bool Appears(const Metrics& metrics, const std::string& line, absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (absl::Now() < end) {
    if (metrics.Text().find(line) != std::string::npos) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return false;
}

TEST(HousekeepingTest, FreedMemoryIsReturnedWhenIdle) {
  const auto kept = Burst();
  const int64_t before = ResidentBytes();
  EXPECT_GT(before, 250 * kMiB);  // malloc keeps it
  Metrics metrics;
  {
    Housekeeping housekeeping({.interval = absl::Milliseconds(5)}, &metrics, {});
    housekeeping.SetBusy(false);
    EXPECT_TRUE(Appears(metrics, "ringattn_memory_trims_total 1", absl::Seconds(10)));
  }
  EXPECT_LT(ResidentBytes(), before - 200 * kMiB);
}

TEST(HousekeepingTest, ExportsMetrics) {
  Metrics metrics;
  auto listener = wire::Listener::Bind({.address = "127.0.0.1:0"});
  ASSERT_TRUE(listener.ok());
  const Housekeeping housekeeping({}, &metrics, {{"public", listener->get()}});
  EXPECT_TRUE(
      Appears(metrics, "ringattn_open_connections{listener=\"public\"} 0", absl::Seconds(10)));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_refused_connections_total{listener=\"public\"}"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_max_descriptors"));
}

}  // namespace
}  // namespace ringattn::server
