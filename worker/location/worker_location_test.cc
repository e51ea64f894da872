#include "worker/location/worker_location.h"

#include "common/local_memory/local_socket.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(WorkerLocationTest, TheKernelsBootIdIsTheDefaultHost) {
  const v1::WorkerLocation location = MakeLocation({}, std::nullopt);
  EXPECT_EQ(location.host(), HostId());
  EXPECT_FALSE(location.has_slot());
  EXPECT_EQ(location.zone(), "");
  for (const v1::NetworkInterface& interface : location.interfaces()) {
    EXPECT_NE(interface.name(), "lo");
    EXPECT_GT(interface.addresses_size(), 0);
  }
}

TEST(WorkerLocationTest, OptionsReplaceWhatTheMachineReports) {
  const LocationOptions options{
      .host_id = "rack1-node2", .accelerator_domain = "clique-7", .slot = 3, .zone = "rack1"};
  const v1::WorkerLocation location = MakeLocation(options, /*device_slot=*/9);
  EXPECT_EQ(location.host(), "rack1-node2");
  EXPECT_EQ(location.accelerator_domain(), "clique-7");
  EXPECT_EQ(location.slot(), 3);
  EXPECT_EQ(location.zone(), "rack1");
  EXPECT_EQ(MakeLocation({}, 9).slot(), 9);
}

}  // namespace
}  // namespace ringattn::worker
