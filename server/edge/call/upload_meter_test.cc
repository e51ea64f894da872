#include "server/edge/call/upload_meter.h"

#include "gtest/gtest.h"
#include "server/edge/data/stall_watch.h"

namespace ringattn::server {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(200);

Limits MakeLimits() {
  Limits limits;
  limits.min_upload_bytes_per_second = 1000;
  limits.upload_grace = absl::Seconds(10);
  limits.upload_grace_contended = absl::Seconds(2);
  return limits;
}

// Sends `bytes` every `interval`; returns when the client is found too slow, at most `limit`.
absl::Duration TimeUntilTooSlow(int64_t bytes, absl::Duration interval, absl::Duration limit,
                                bool waits = true, bool contended = false) {
  UploadMeter meter(MakeLimits());
  const absl::Time begin = absl::UnixEpoch();
  absl::Time next = begin + interval;
  for (absl::Time now = begin; now - begin <= limit; now += kLook) {
    const bool sends = now >= next;
    if (sends) next += interval;
    meter.Look(now, sends ? bytes : 0, waits, contended);
    if (meter.too_slow()) return now - begin;
  }
  return limit;
}

constexpr absl::Duration kHour = absl::Hours(1);

TEST(UploadMeterTest, ATrickleEndsAfterTheGrace) {
  const absl::Duration found = TimeUntilTooSlow(1, absl::Milliseconds(2500), kHour);
  EXPECT_GE(found, absl::Seconds(10));
  EXPECT_LE(found, absl::Seconds(11));
}

TEST(UploadMeterTest, HalfTheRateEndsAfterTwiceTheGrace) {
  const absl::Duration found = TimeUntilTooSlow(500, absl::Seconds(1), kHour);
  EXPECT_GE(found, absl::Seconds(19));
  EXPECT_LE(found, absl::Seconds(22));
}

TEST(UploadMeterTest, TheMinimumRateNeverExpires) {
  EXPECT_EQ(TimeUntilTooSlow(1010, absl::Seconds(1), kHour), kHour);
}

TEST(UploadMeterTest, LargeChunksCountOnArrival) {
  EXPECT_EQ(TimeUntilTooSlow(9'500, absl::Seconds(9), kHour), kHour);
  EXPECT_LT(TimeUntilTooSlow(100'000, absl::Seconds(12), kHour), absl::Seconds(12));
}

TEST(UploadMeterTest, TimeWithoutWaitingForTheClientDoesNotCount) {
  EXPECT_EQ(TimeUntilTooSlow(0, kHour, kHour, /*waits=*/false), kHour);
}

TEST(UploadMeterTest, AFastStartEarnsNoCredit) {
  UploadMeter meter(MakeLimits());
  absl::Time now = absl::UnixEpoch();
  meter.Look(now, int64_t{1} << 40, true, false);
  const absl::Time begin = now;
  while (!meter.too_slow() && now - begin < kHour) meter.Look(now += kLook, 0, true, false);
  EXPECT_LE(now - begin, absl::Seconds(11));
}

TEST(UploadMeterTest, TheGraceIsShorterUnderContention) {
  const absl::Duration found =
      TimeUntilTooSlow(1, absl::Milliseconds(2500), kHour, /*waits=*/true, /*contended=*/true);
  EXPECT_GE(found, absl::Seconds(2));
  EXPECT_LE(found, absl::Seconds(3));
}

TEST(UploadMeterTest, BriefContentionChangesNothing) {
  UploadMeter meter(MakeLimits());
  absl::Time now = absl::UnixEpoch();
  for (int i = 0; i < 45; ++i) {  // 9 s without data
    meter.Look(now += kLook, 0, true, /*contended=*/i % 5 != 0);
    ASSERT_FALSE(meter.too_slow());
  }
}

TEST(UploadMeterTest, APauseOfThisProcessDoesNotCount) {
  UploadMeter meter(MakeLimits());
  absl::Time now = absl::UnixEpoch();
  meter.Look(now, 0, true, false);
  meter.Look(now + kHour, 0, true, false);
  EXPECT_FALSE(meter.too_slow());
}

TEST(StallWatchTest, StalledMeansNoMoveBetweenTwoLooks) {
  StallWatch watch;
  EXPECT_FALSE(watch.Look(true));  // no earlier look to compare with
  EXPECT_TRUE(watch.Look(true));
  EXPECT_TRUE(watch.Look(true));
  watch.Moved();
  EXPECT_FALSE(watch.Look(true));
  EXPECT_TRUE(watch.Look(true));
  EXPECT_FALSE(watch.Look(false));
  EXPECT_FALSE(watch.Look(true));
  EXPECT_TRUE(watch.Look(true));
}

}  // namespace
}  // namespace ringattn::server
