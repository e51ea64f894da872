#include "client/cli/bench/payload_bound.h"

#include <algorithm>
#include <thread>

#include "client/transfer/worker_channels.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

using Kind = PayloadBound::Kind;

constexpr PayloadBound kRelay{.kind = Kind::kTcp, .side_by_side = 3, .bytes_per_second = 5e9};

CallReport ReportOf(v1::Transport transport, int workers) {
  CallReport report;
  report.accepted.set_transport(transport);
  report.accepted.mutable_plan()->set_world_size(workers);
  report.summary.set_bytes_up(1000);
  return report;
}

TEST(PayloadBounds, TheRelayUsesTheGivenMeasurement) {
  PayloadBounds bounds(0, kRelay);
  const auto bound = bounds.Of(ReportOf(v1::TRANSPORT_RELAY, 2));
  ASSERT_TRUE(bound.ok());
  EXPECT_EQ(bound->ToJson(),
            (Json{{"kind", "tcp"}, {"connections", 3}, {"bytes_per_second", 5e9}}));
}

TEST(PayloadBounds, HostMemoryIsBoundByMemcpyWithTheWorkersThreads) {
  PayloadBounds bounds(0, kRelay);
  const auto bound = bounds.Of(ReportOf(v1::TRANSPORT_HOST_MEMORY, 3));
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->kind, Kind::kMemcpy);
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_EQ(bound->side_by_side, 3 * std::clamp(cores / 6, 2, 8));
  // Slower than any disk or faster than any memory would mean that nothing was measured.
  EXPECT_GT(bound->bytes_per_second, 1e8);
  EXPECT_LT(bound->bytes_per_second, 1e13);
  const auto again = bounds.Of(ReportOf(v1::TRANSPORT_HOST_MEMORY, 3));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->bytes_per_second, bound->bytes_per_second) << "measured once";
}

TEST(PayloadBounds, DirectStreamsAreBoundByTcpOnAsManyConnections) {
  PayloadBounds given(3, kRelay);
  const auto bound = given.Of(ReportOf(v1::TRANSPORT_DIRECT, 2));
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->kind, Kind::kTcp);
  EXPECT_EQ(bound->side_by_side, 6);
  EXPECT_GT(bound->bytes_per_second, 1e7);
  // Three connections have been measured for the relay.
  PayloadBounds known(3, kRelay);
  EXPECT_EQ(known.Of(ReportOf(v1::TRANSPORT_DIRECT, 1))->bytes_per_second, 5e9);
}

TEST(PayloadBounds, CudaMemoryHasNone) {
  PayloadBounds bounds(0, kRelay);
  const auto bound = bounds.Of(ReportOf(v1::TRANSPORT_CUDA_MEMORY, 1));
  ASSERT_TRUE(bound.ok());
  EXPECT_EQ(bound->bytes_per_second, 0);
  EXPECT_EQ(bound->ToJson(), (Json{{"kind", "none"}}));
  EXPECT_EQ(bound->Text(), "not measured");
}

}  // namespace
}  // namespace ringattn::client::cli
