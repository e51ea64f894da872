#include "server/edge/endpoint.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

TEST(EndpointTest, AnOccupiedPortIsNamedInTheError) {
  const grpc::ResourceQuota quota("test");
  auto first = Endpoint::Start({.name = "public", .listen = "127.0.0.1:0"}, quota, {});
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = Endpoint::Start({.name = "control", .listen = (*first)->address()}, quota, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(),
            "control: cannot listen on " + (*first)->address() + ": Address already in use");
}

}  // namespace
}  // namespace ringattn::server
