#include "worker/service/measurement.h"

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/testing/scalar_device.h"

namespace ringattn {
namespace {

TEST(Measurement, TheLinkHasARateHoweverShortTheBudget) {
  for (const absl::Duration budget :
       {absl::ZeroDuration(), absl::Milliseconds(1), absl::Milliseconds(30)}) {
    for (int round = 0; round < 5; ++round) {
      const absl::Time begin = absl::Now();
      auto rate = MeasureLinkBytesPerSecond("127.0.0.1", budget);
      ASSERT_TRUE(rate.ok()) << rate.status();
      EXPECT_GT(*rate, 1e5);
      EXPECT_LT(*rate, 1e12);
      EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
    }
  }
  EXPECT_FALSE(MeasureLinkBytesPerSecond("no.such.host.invalid", absl::ZeroDuration()).ok());
}

// The scalar device computes fp32 only: what it refuses is reported, not guessed.
TEST(Measurement, ADeviceThatCannotComputeIsAnError) {
  ScalarDevice device;
  EXPECT_EQ(MeasureFlopsPerSecond(device, {}, absl::Milliseconds(10)).status().code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace ringattn
