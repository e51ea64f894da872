#include "worker/comm/lone/lone_ring_transport.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(LoneRingTransport, FormsARingOfOne) {
  LoneRingTransport transport(absl::NotFoundError("no library"));
  const auto blob = transport.Prepare(7, 0, 1);
  ASSERT_TRUE(blob.ok());
  auto ring = transport.Connect(7, {*blob}, absl::Now() + absl::Seconds(1));
  ASSERT_TRUE(ring.ok());
  EXPECT_EQ((*ring)->world_size(), 1);
  RunControl control;
  EXPECT_TRUE((*ring)->Start({}, {}, &control)->Wait(absl::Now()).ok());
  EXPECT_FALSE((*ring)->Start({PeerTransfer{}}, {}, &control)->Wait(absl::Now()).ok());
}

TEST(LoneRingTransport, RefusesMoreWithTheReason) {
  LoneRingTransport transport(absl::NotFoundError("libnccl.so.2: cannot open"));
  const auto blob = transport.Prepare(7, 1, 2);
  ASSERT_EQ(blob.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(blob.status().message()),
              testing::HasSubstr("libnccl.so.2: cannot open"));
}

}  // namespace
}  // namespace ringattn::worker
