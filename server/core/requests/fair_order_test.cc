#include "server/core/requests/fair_order.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using Ids = std::vector<FairOrder::Id>;

// Serves one request that takes as long as expected.
void Serve(FairOrder* order, FairOrder::Id id) {
  const double cost = order->Has(id) ? order->CostOf(id) : 0;
  order->Start(id);
  order->Finish(id, cost);
}

// Serves all waiting requests in order; returns the order.
Ids ServeAll(FairOrder* order, Ids waiting) {
  Ids served;
  while (!waiting.empty()) {
    order->Sort(&waiting);
    served.push_back(waiting.front());
    Serve(order, waiting.front());
    waiting.erase(waiting.begin());
  }
  return served;
}

TEST(FairOrderTest, SimilarRequestsOfAClientKeepTheirOrder) {
  FairOrder order;
  order.Enter(1, "a", 5);
  order.Enter(2, "a", 1);
  order.Enter(3, "a", 7);
  EXPECT_EQ(ServeAll(&order, {3, 2, 1}), (Ids{1, 2, 3}));
}

// A client of weight three receives three quarters of the time.
TEST(FairOrderTest, SharesFollowWeights) {
  FairOrder order;
  Ids waiting;
  for (FairOrder::Id id = 0; id < 40; ++id) {
    order.Enter(100 + id, "one", 1, 1);
    order.Enter(200 + id, "three", 1, 3);
    waiting.insert(waiting.end(), {100 + id, 200 + id});
  }
  const Ids served = ServeAll(&order, waiting);
  const auto of_three = [&](size_t first) {
    return std::count_if(served.begin(), served.begin() + first,
                         [](FairOrder::Id id) { return id >= 200; });
  };
  EXPECT_NEAR(of_three(8), 6, 1);
  EXPECT_NEAR(of_three(24), 18, 1);
  EXPECT_NEAR(of_three(48), 36, 1);
}

// An overrun is charged by weight, like an expected cost.
TEST(FairOrderTest, WeightsApplyToActualCost) {
  FairOrder order;
  order.Enter(9, "other", 1);  // while no request waits, all clients are equal
  order.Enter(1, "light", 1, 1);
  order.Enter(2, "heavy", 1, 4);
  order.Start(1);
  order.Finish(1, 8);  // clock 8
  order.Start(2);
  order.Finish(2, 8);  // clock 2
  order.Enter(3, "light", 1, 1);
  order.Enter(4, "heavy", 1, 4);
  order.Enter(5, "heavy", 1, 0.15);
  EXPECT_TRUE(order.Before(4, 3));
  order.Start(4);
  EXPECT_TRUE(order.Before(5, 3));  // clock 2.25
  order.Start(5);                   // adds 6.7
  order.Enter(6, "heavy", 1, 4);
  EXPECT_TRUE(order.Before(3, 6));
}

// Many callers share a connection.
TEST(FairOrderTest, ASmallRequestOvertakesLargeOnesOfItsClient) {
  FairOrder order;
  Ids waiting;
  for (FairOrder::Id id = 1; id <= 64; ++id) {
    order.Enter(id, "a", 2);
    waiting.push_back(id);
  }
  order.Start(1);
  waiting.erase(waiting.begin());
  order.Enter(100, "a", 0.001);
  order.Enter(101, "a", 0.002);
  EXPECT_TRUE(order.Before(100, 2));
  EXPECT_TRUE(order.Before(101, 2));
  // The client is charged for it as usual.
  order.Enter(200, "b", 2);
  EXPECT_TRUE(order.Before(200, 100));
}

// Overtaking within a client is bounded.
TEST(FairOrderTest, SmallRequestsDoNotStarveTheirClientsLargeOne) {
  FairOrder order({/*passing_factor=*/4, /*passing_seconds=*/0});
  order.Enter(1, "a", 2);
  double passed = 0;
  for (FairOrder::Id id = 100; passed < 100; ++id, passed += 0.1) {
    order.Enter(id, "a", 0.1);
    if (order.Before(1, id)) break;
    Serve(&order, id);
  }
  EXPECT_NEAR(passed, 8, 0.2);
}

TEST(FairOrderTest, ClientsAlternate) {
  FairOrder order;
  for (int i = 0; i < 3; ++i) order.Enter(10 + i, "a", 1);
  for (int i = 0; i < 3; ++i) order.Enter(20 + i, "b", 1);
  EXPECT_EQ(ServeAll(&order, {10, 11, 12, 20, 21, 22}), (Ids{10, 20, 11, 21, 12, 22}));
}

// Shares are measured in time, not in requests.
TEST(FairOrderTest, SharesAreTimeNotRequests) {
  FairOrder order;
  order.Enter(1, "a", 4);
  order.Enter(2, "a", 4);
  for (int i = 0; i < 6; ++i) order.Enter(10 + i, "b", 1);
  EXPECT_EQ(ServeAll(&order, {1, 2, 10, 11, 12, 13, 14, 15}), (Ids{10, 11, 12, 13, 1, 14, 15, 2}));
}

// The actual cost counts, not the expected one.
TEST(FairOrderTest, AClientIsChargedTheActualCost) {
  FairOrder order;
  order.Enter(1, "a", 1);
  order.Enter(2, "a", 1);
  for (FairOrder::Id id = 10; id < 19; ++id) order.Enter(id, "b", 1);
  order.Start(1);
  EXPECT_FALSE(order.Waits(1));
  EXPECT_TRUE(order.Has(1));
  order.Finish(1, 8);
  EXPECT_FALSE(order.Has(1));
  EXPECT_EQ(ServeAll(&order, {2, 10, 11, 12, 13, 14, 15, 16, 17, 18}),
            (Ids{10, 11, 12, 13, 14, 15, 16, 17, 2, 18}));
}

// The charge also applies to the client's later requests.
TEST(FairOrderTest, ADebtPersistsWhileOthersWait) {
  FairOrder order;
  order.Enter(1, "a", 1);
  order.Start(1);
  order.Enter(10, "b", 1);
  order.Enter(11, "b", 1);
  order.Finish(1, 5);
  order.Enter(2, "a", 0.5);
  EXPECT_EQ(ServeAll(&order, {2, 10, 11}), (Ids{10, 11, 2}));
}

// A run that takes less than expected is credited.
TEST(FairOrderTest, UnusedCostIsCredited) {
  FairOrder order;
  order.Enter(1, "a", 10);
  order.Enter(2, "a", 10);
  order.Enter(10, "b", 8);
  order.Enter(11, "b", 8);
  order.Start(1);
  EXPECT_TRUE(order.Before(11, 2));
  order.Finish(1, 1);
  EXPECT_TRUE(order.Before(10, 2));
  EXPECT_TRUE(order.Before(2, 11));
}

// A client earns no credit while one of its requests waits.
TEST(FairOrderTest, AWaitingRequestEarnsNoCredit) {
  FairOrder order;
  order.Enter(1, "a", 1);  // its inputs do not arrive
  for (FairOrder::Id id = 10; id < 20; ++id) order.Enter(id, "b", 1);
  for (FairOrder::Id id = 10; id < 18; ++id) Serve(&order, id);
  for (FairOrder::Id id = 2; id < 6; ++id) order.Enter(id, "a", 1);
  order.Finish(1, 0);
  EXPECT_EQ(ServeAll(&order, {2, 3, 4, 5, 18, 19}), (Ids{2, 18, 3, 19, 4, 5}));
}

// The running request is not interrupted; the other 63 of 64 wait.
TEST(FairOrderTest, ASmallRequestDoesNotWaitForAnotherClientsQueue) {
  for (const bool one_client : {true, false}) {
    FairOrder order;
    Ids waiting;
    for (FairOrder::Id id = 1; id <= 64; ++id) {
      order.Enter(id, one_client ? "a" : absl::StrCat("a", id), 2);
      waiting.push_back(id);
    }
    order.Start(1);
    waiting.erase(waiting.begin());
    order.Enter(100, "b", 0.001);
    waiting.push_back(100);
    order.Sort(&waiting);
    EXPECT_EQ(waiting.front(), 100u);
  }
}

// Of 64 clients with one large request each, none goes before a small client's next requests.
TEST(FairOrderTest, ASmallClientsNextRequestsDoNotWaitForManyClients) {
  FairOrder order;
  Ids waiting;
  for (FairOrder::Id id = 1; id <= 64; ++id) {
    order.Enter(id, absl::StrCat("a", id), 1.4);
    waiting.push_back(id);
  }
  order.Start(1);
  waiting.erase(waiting.begin());
  for (FairOrder::Id id = 100; id < 120; ++id) {
    order.Enter(id, "b", 0.001);
    waiting.push_back(id);
    order.Sort(&waiting);
    EXPECT_EQ(waiting.front(), id);
    Serve(&order, id);
    waiting.erase(waiting.begin());
  }
}

// A client that sends one request after another gets an equal share.
TEST(FairOrderTest, ManySmallRequestsDoNotStarveALargeOne) {
  FairOrder order;
  order.Enter(1, "large", 2);
  int small = 0;
  for (FairOrder::Id id = 100;; ++id, ++small) {
    order.Enter(id, "small", 0.1);
    if (order.Before(1, id)) break;
    Serve(&order, id);
  }
  EXPECT_NEAR(small, 20, 1);  // together as much as the large request
}

// Many clients with one small request each do not starve a large one either.
TEST(FairOrderTest, ManyClientsDoNotStarveALargeRequest) {
  FairOrder order({/*passing_factor=*/4, /*passing_seconds=*/0});
  order.Enter(1, "large", 2);
  order.Enter(2, "another", 2);
  double passed = 0;
  FairOrder::Id id = 100;
  for (; passed < 100; ++id, passed += 0.1) {
    order.Enter(id, absl::StrCat("client-", id), 0.1);
    if (order.Before(1, id)) break;
    Serve(&order, id);
  }
  EXPECT_NEAR(passed, 8, 0.2);
  EXPECT_TRUE(order.Before(1, 2));
  Serve(&order, 1);
  // The other request has waited as long, but overdue requests do not block everyone.
  EXPECT_TRUE(order.Before(id, 2));
}

// Large requests of two clients overtake each other only within the bound.
TEST(FairOrderTest, OnlyAClientsOldestRequestCountsOvertaking) {
  FairOrder order({/*passing_factor=*/4, /*passing_seconds=*/10});
  Ids waiting;
  for (FairOrder::Id id = 1; id <= 32; ++id) {
    order.Enter(id, "a", 2);
    order.Enter(100 + id, "b", 2);
    waiting.push_back(id);
    waiting.push_back(100 + id);
  }
  for (FairOrder::Id small = 1000; !waiting.empty(); ++small) {
    order.Enter(small, absl::StrCat("small-", small), 0.001);
    EXPECT_EQ(order.Before(small, waiting.front()), true) << waiting.size() << " wait";
    Serve(&order, small);
    order.Sort(&waiting);
    Serve(&order, waiting.front());
    waiting.erase(waiting.begin());
    if (!waiting.empty()) order.Sort(&waiting);
  }
}

// A request that ends early is charged for what it used.
TEST(FairOrderTest, ACancelledRequestIsChargedForItsUse) {
  for (const double used : {0.0, 9.0}) {
    FairOrder order;
    order.Enter(1, "a", 6);
    order.Enter(2, "a", 6);
    order.Enter(3, "b", 4);
    order.Enter(4, "b", 4);
    EXPECT_TRUE(order.Before(4, 2));
    order.Finish(1, used);
    EXPECT_FALSE(order.Has(1));
    EXPECT_EQ(order.Before(2, 4), used == 0);
  }
}

// A request whose run was taken back stands where it stood, and its client is charged nothing.
TEST(FairOrderTest, AReturnedRequestKeepsItsPlace) {
  FairOrder order;
  order.Enter(1, "a", 5);
  order.Enter(2, "a", 5);
  order.Enter(3, "b", 8);
  order.Start(1);
  EXPECT_TRUE(order.Before(3, 2));
  order.Return(1);
  EXPECT_TRUE(order.Waits(1));
  EXPECT_TRUE(order.Before(1, 2));
  EXPECT_TRUE(order.Before(1, 3));
  order.Return(1);   // it waits: no effect
  order.Return(99);  // unknown: no effect
  order.Finish(1, 0);
  EXPECT_TRUE(order.Before(2, 3));
}

TEST(FairOrderTest, VisitsSkipClientsAndStop) {
  FairOrder order;
  for (FairOrder::Id id = 1; id <= 3; ++id) {
    order.Enter(id, "a", 1);
    order.Enter(10 + id, "b", 1);
    order.Enter(20 + id, "c", 1);
  }
  Ids ids;
  order.VisitWaiting([&](FairOrder::Id id, const std::string& client) {
    ids.push_back(id);
    if (id == 22) return FairOrder::Visit::kStop;
    return client == "b" ? FairOrder::Visit::kSkipClient : FairOrder::Visit::kNext;
  });
  EXPECT_EQ(ids, (Ids{1, 11, 21, 2, 22}));
}

// Thousands of requests of one client, or of as many clients, wait.
TEST(FairOrderTest, WorkDoesNotGrowWithWaitingRequests) {
  for (const bool one_client : {true, false}) {
    FairOrder order;
    FairOrder::Id next = 0;
    const auto enter = [&] {
      ++next;
      order.Enter(next, one_client ? "a" : absl::StrCat("a", next), 0.001);
    };
    while (next < 5000) enter();
    const int64_t before = order.steps();
    for (int i = 0; i < 1000; ++i) {
      FairOrder::Id first = 0;
      order.VisitWaiting([&](FairOrder::Id id, const std::string&) {
        first = id;
        return FairOrder::Visit::kStop;
      });
      order.Start(first);
      order.Finish(first, 0.001);
      enter();
    }
    EXPECT_LE(order.steps() - before, 4000);
  }
}

TEST(FairOrderTest, IdleClientsAreForgotten) {
  FairOrder order;
  for (FairOrder::Id id = 1; id <= 10; ++id) {
    order.Enter(id, absl::StrCat("client-", id), 1);
    Serve(&order, id);
  }
  EXPECT_EQ(order.client_count(), 0u);
  order.Enter(1, "waits", 1e9);
  for (FairOrder::Id id = 2; id <= 5000; ++id) {
    order.Enter(id, absl::StrCat("client-", id), 1);
    Serve(&order, id);
  }
  EXPECT_LE(order.client_count(), FairOrder::kMaxClients + 1);
  order.Start(2);  // no entry: no effect
  order.Finish(2, 1);
}

}  // namespace
}  // namespace ringattn::server
