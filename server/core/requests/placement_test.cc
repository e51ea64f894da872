#include "server/core/requests/placement.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using Result = Placement::Result;
constexpr SlotLimits kLimits = {/*all=*/8, /*express=*/2};

Site Occupied(int operations, double largest_cost) {
  Site site;
  site.operations = operations;
  site.largest_cost = largest_cost;
  site.computes = true;
  return site;
}

PlacementRequest Costs(double seconds, int count = 1) {
  PlacementRequest request;
  request.client = "me";
  request.cost_seconds = seconds;
  request.count = count;
  return request;
}

TEST(PlacementTest, TakesTheLeastOccupiedByRank) {
  std::vector<Site> sites(4);
  sites[0].operations = 3;
  sites[1].operations = 1;
  sites[2].operations = 1;
  sites[2].reserved_bytes = 10;
  const Placement placement = Place(sites, Costs(1, 3), kLimits, false);
  EXPECT_EQ(placement.result, Result::kPlaced);
  EXPECT_EQ(placement.ranks, (std::vector<int>{1, 2, 3}));
  EXPECT_FALSE(placement.is_express);
}

TEST(PlacementTest, PrefersWorkersThatServeNoSteps) {
  std::vector<Site> sites(3);
  sites[0].serves_steps = true;
  sites[1].operations = 2;
  sites[2].operations = 1;
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (std::vector<int>{1, 2}));
  EXPECT_EQ(Place(sites, Costs(1, 3), kLimits, false).ranks, (std::vector<int>{0, 1, 2}));
}

TEST(PlacementTest, WaitsForMemoryThatCouldBecomeFree) {
  std::vector<Site> sites(2);
  sites[0].memory_bytes = 100;
  sites[0].reserved_bytes = 50;
  sites[1].memory_bytes = 40;
  PlacementRequest request = Costs(1);
  request.buffer_bytes = 60;
  EXPECT_EQ(Place(sites, request, kLimits, false).result, Result::kWaitsForMemory);
  sites[0].workspace_bytes = 41;
  const Placement never = Place(sites, request, kLimits, false);
  EXPECT_EQ(never.result, Result::kNeverFits);
  EXPECT_EQ(never.roomiest_rank, 0);
  sites[1].memory_bytes = 0;  // unknown
  EXPECT_EQ(Place(sites, request, kLimits, false).ranks, (std::vector<int>{1}));
}

// Returns idle sites on hosts of these sizes.
std::vector<Site> Hosts(const std::vector<int>& sizes) {
  std::vector<Site> sites;
  for (int host = 0; host < static_cast<int>(sizes.size()); ++host) {
    for (int i = 0; i < sizes[host]; ++i) {
      sites.emplace_back();
      sites.back().host = host;
    }
  }
  return sites;
}

using Ranks = std::vector<int>;

TEST(PlacementTest, ARequestStaysOnOneHost) {
  std::vector<Site> sites = Hosts({2, 2});
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (Ranks{0, 1}));
  // The idlest workers are on two hosts.
  sites[0].operations = 1;
  sites[2].operations = sites[3].operations = 1;
  sites[2].reserved_bytes = 5;
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (Ranks{0, 1}));
  sites[1].operations = 2;
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (Ranks{2, 3}));
  // Single workers are taken from all hosts.
  sites[3].operations = 0;
  EXPECT_EQ(Place(sites, Costs(1), kLimits, false).ranks, (Ranks{3}));
}

TEST(PlacementTest, ARequestTakesWholeHosts) {
  const std::vector<Site> sites = Hosts({2, 4, 3, 2});
  EXPECT_EQ(Place(sites, Costs(1, 4), kLimits, false).ranks, (Ranks{2, 3, 4, 5}));
  EXPECT_EQ(Place(sites, Costs(1, 3), kLimits, false).ranks, (Ranks{6, 7, 8}));
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (Ranks{0, 1}));
  EXPECT_EQ(Place(sites, Costs(1, 7), kLimits, false).ranks, (Ranks{2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(Place(sites, Costs(1, 6), kLimits, false).ranks, (Ranks{2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(Place(sites, Costs(1, 11), kLimits, false).ranks.size(), 11u);
}

TEST(PlacementTest, ARequestWaitsForAHostWithRoom) {
  std::vector<Site> sites = Hosts({2, 2});
  sites[0].operations = sites[2].operations = 8;
  sites[0].computes = sites[2].computes = true;
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).result, Result::kWaitsForSlots);
  sites[0].operations = sites[2].operations = 0;
  for (Site& site : sites) site.memory_bytes = 100;
  sites[0].reserved_bytes = sites[2].reserved_bytes = 50;
  PlacementRequest request = Costs(1, 2);
  request.buffer_bytes = 60;
  EXPECT_EQ(Place(sites, request, kLimits, false).result, Result::kWaitsForMemory);
  // No host could ever hold it alone.
  sites[0].serves = sites[2].serves = false;
  EXPECT_EQ(Place(sites, request, kLimits, false).ranks, (Ranks{1, 3}));
}

TEST(PlacementTest, SlowHostsAreTakenWhileFastOnesAreBusy) {
  std::vector<Site> sites = Hosts({2, 2});
  sites[0].on_slow_host = sites[1].on_slow_host = true;
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (Ranks{2, 3}));
  EXPECT_EQ(Place(sites, Costs(1), kLimits, false).ranks, (Ranks{2}));
  sites[2].operations = sites[3].operations = 1;
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, false).ranks, (Ranks{0, 1}));
}

TEST(PlacementTest, ExpressSlotsAreForSmallRequests) {
  const std::vector<Site> sites = {Occupied(6, /*largest_cost=*/8)};
  EXPECT_EQ(Place(sites, Costs(1.1), kLimits, false).result, Result::kWaitsForSlots);
  const Placement placement = Place(sites, Costs(1), kLimits, false);
  EXPECT_EQ(placement.result, Result::kPlaced);
  EXPECT_TRUE(placement.is_express);
}

// Forty such requests would otherwise take every slot and send nothing.
TEST(PlacementTest, ManyDocumentsTakeNoExpressSlot) {
  std::vector<Site> sites = {Occupied(6, /*largest_cost=*/8)};
  PlacementRequest request = Costs(0.001);
  request.many_documents = true;
  EXPECT_EQ(Place(sites, request, kLimits, false).result, Result::kWaitsForSlots);
  sites[0].computes = false;
  EXPECT_EQ(Place(sites, request, kLimits, false).result, Result::kWaitsForSlots);
  sites[0].operations = 5;
  EXPECT_EQ(Place(sites, request, kLimits, false).result, Result::kPlaced);
}

TEST(PlacementTest, AClientHoldsOneExpressSlotPerMember) {
  std::vector<Site> sites = {Occupied(7, /*largest_cost=*/8)};
  sites[0].express_operations = 1;
  sites[0].express_clients = {"me"};
  EXPECT_EQ(Place(sites, Costs(1), kLimits, false).result, Result::kWaitsForSlots);
  sites[0].express_clients = {"you"};
  EXPECT_EQ(Place(sites, Costs(1), kLimits, false).result, Result::kPlaced);
  sites[0].operations = 8;
  sites[0].express_operations = 2;
  EXPECT_EQ(Place(sites, Costs(1), kLimits, false).result, Result::kWaitsForSlots);
}

// Clients that hardly upload hold all common slots.
TEST(PlacementTest, ExpressSlotsAreOpenWhileTheMemberIsIdle) {
  std::vector<Site> sites = {Occupied(6, /*largest_cost=*/0.001)};
  sites[0].computes = false;
  EXPECT_TRUE(Place(sites, Costs(100), kLimits, false).is_express);
}

// A client's further requests do not: its first small request would wait for them.
TEST(PlacementTest, AClientWithSlotsTakesNoExpressSlotForALargeRequest) {
  std::vector<Site> sites = {Occupied(6, /*largest_cost=*/8)};
  sites[0].computes = false;
  sites[0].clients = {"me"};
  EXPECT_EQ(Place(sites, Costs(8), kLimits, false).result, Result::kWaitsForSlots);
  EXPECT_TRUE(Place(sites, Costs(1), kLimits, false).is_express);
  sites[0].clients = {"you"};
  EXPECT_TRUE(Place(sites, Costs(8), kLimits, false).is_express);
}

TEST(PlacementTest, OnlyExpressSlotsAreTakenWhileAnEarlierRequestWaits) {
  std::vector<Site> sites = {Occupied(2, /*largest_cost=*/8), Occupied(6, /*largest_cost=*/8)};
  EXPECT_EQ(Place(sites, Costs(1, 2), kLimits, true).ranks, (std::vector<int>{0, 1}));
  EXPECT_TRUE(Place(sites, Costs(1, 2), kLimits, true).is_express);
  EXPECT_EQ(Place(sites, Costs(5, 2), kLimits, true).result, Result::kWaitsForSlots);
}

// Admission looks at no request that these functions exclude.
TEST(PlacementTest, ExclusionsAreCertain) {
  std::mt19937 random(1);
  const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
  int excluded = 0, full = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::vector<Site> sites(1 + below(4));
    for (size_t rank = 0; rank < sites.size(); ++rank) {
      Site& site = sites[rank];
      site.memory_bytes = below(4) == 0 ? 0 : 50 + below(100);
      site.reserved_bytes = below(60);
      site.operations = 5 + below(4);
      site.express_operations = below(3);
      if (below(2) == 0) site.clients.insert("me");
      if (below(2) == 0) site.express_clients.insert("me");
      site.computes = below(2) == 0;
      site.largest_cost = below(20);
      site.host = static_cast<int>(rank) / 2;
      site.serves = below(8) != 0;
      site.workspace_bytes = below(3);
    }
    PlacementRequest request = Costs(below(3), 1 + below(static_cast<int>(sites.size())));
    request.buffer_bytes = below(110);
    const int64_t most_bytes = request.buffer_bytes + 2;  // with any workspace
    const Placement express = Place(sites, request, kLimits, true);
    const std::string* const client = below(2) == 0 ? &request.client : nullptr;
    if (!MightTakeExpress(sites, client, request.cost_seconds, kLimits) &&
        most_bytes <= LeastBytes(sites).free) {
      ++excluded;
      ASSERT_NE(express.result, Result::kPlaced) << round;
      ASSERT_NE(express.result, Result::kWaitsForMemory) << round;
    }
    const auto serving =
        std::count_if(sites.begin(), sites.end(), [](const Site& site) { return site.serves; });
    if (most_bytes <= LeastBytes(sites).total && serving >= request.count) {
      ASSERT_NE(express.result, Result::kNeverFits) << round;
    }
    if (!HasCommonSlot(sites, kLimits)) {
      ++full;
      const Placement any = Place(sites, request, kLimits, false);
      ASSERT_EQ(any.result, express.result) << round;
      ASSERT_EQ(any.ranks, express.ranks) << round;
    }
  }
  EXPECT_GT(excluded, 1000);
  EXPECT_GT(full, 1000);
}

}  // namespace
}  // namespace ringattn::server
