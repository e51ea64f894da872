#include "server/core/fair_order.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using Ids = std::vector<FairOrder::Id>;

// Serves everything that waits, one after another.
Ids ServeAll(FairOrder* order, Ids waiting) {
  Ids served;
  while (!waiting.empty()) {
    order->Sort(&waiting);
    served.push_back(waiting.front());
    order->Serve(waiting.front());
    waiting.erase(waiting.begin());
  }
  return served;
}

TEST(FairOrderTest, OneClientsRequestsKeepTheirOrder) {
  FairOrder order;
  order.Enter(1, "a", 5);
  order.Enter(2, "a", 0.1);
  order.Enter(3, "a", 3);
  EXPECT_EQ(ServeAll(&order, {3, 2, 1}), (Ids{1, 2, 3}));
}

TEST(FairOrderTest, ClientsTakeTurns) {
  FairOrder order;
  for (int i = 0; i < 3; ++i) order.Enter(10 + i, "a", 1);
  for (int i = 0; i < 3; ++i) order.Enter(20 + i, "b", 1);
  EXPECT_EQ(ServeAll(&order, {10, 11, 12, 20, 21, 22}), (Ids{10, 20, 11, 21, 12, 22}));
}

// Shares are of time, not of requests.
TEST(FairOrderTest, TurnsAreAsLongAsTheyCost) {
  FairOrder order;
  order.Enter(1, "a", 4);
  order.Enter(2, "a", 4);
  for (int i = 0; i < 6; ++i) order.Enter(10 + i, "b", 1);
  EXPECT_EQ(ServeAll(&order, {1, 2, 10, 11, 12, 13, 14, 15}), (Ids{10, 1, 11, 12, 13, 14, 2, 15}));
}

// The one that runs is not interrupted; of 64 that wait, none goes before the
// small one.
TEST(FairOrderTest, ASmallRequestWaitsForNoneOfAnothersQueue) {
  for (const bool one_client : {true, false}) {
    FairOrder order;
    Ids waiting;
    for (FairOrder::Id id = 1; id <= 64; ++id) {
      order.Enter(id, one_client ? "a" : absl::StrCat("a", id), 2);
      waiting.push_back(id);
    }
    order.Serve(1);
    waiting.erase(waiting.begin());
    order.Enter(100, "b", 0.001);
    waiting.push_back(100);
    order.Sort(&waiting);
    EXPECT_EQ(waiting.front(), 100u);
  }
}

// Whoever asks again and again gets equal shares, not all of it.
TEST(FairOrderTest, ManySmallOnesDoNotStarveALargeOne) {
  FairOrder order;
  order.Enter(1, "large", 2);
  int small = 0;
  for (FairOrder::Id id = 100;; ++id, ++small) {
    order.Enter(id, "small", 0.1);
    if (order.Before(1, id)) break;
    order.Serve(id);
  }
  EXPECT_EQ(small, 1);  // its clock is past the large one's start from then on
}

// ... nor do many clients with one each, however long they go on.
TEST(FairOrderTest, ManyClientsDoNotStarveALargeOne) {
  FairOrder order({/*passing_factor=*/4, /*passing_seconds=*/0});
  order.Enter(1, "large", 2);
  order.Enter(2, "another", 2);
  double passed = 0;
  FairOrder::Id id = 100;
  for (; passed < 100; ++id, passed += 0.1) {
    order.Enter(id, absl::StrCat("client-", id), 0.1);
    if (order.Before(1, id)) break;
    order.Serve(id);
  }
  EXPECT_NEAR(passed, 8, 0.2);
  EXPECT_TRUE(order.Before(1, 2));
  order.Serve(1);
  // The other one has waited as long, but they do not take over together.
  EXPECT_TRUE(order.Before(id, 2));
}

TEST(FairOrderTest, WhoLeavesIsNotCharged) {
  FairOrder order;
  order.Enter(1, "a", 100);
  order.Enter(2, "a", 1);
  order.Enter(3, "b", 2);
  order.Enter(4, "b", 2);
  EXPECT_TRUE(order.Before(4, 2));
  order.Leave(1);
  EXPECT_FALSE(order.Has(1));
  EXPECT_TRUE(order.Before(2, 4));
  order.Enter(5, "a", 1);
  EXPECT_TRUE(order.Before(5, 4));
}

TEST(FairOrderTest, RemembersNobodyForEver) {
  FairOrder order;
  for (FairOrder::Id id = 1; id <= 10; ++id) {
    order.Enter(id, absl::StrCat("client-", id), 1);
    order.Serve(id);
  }
  EXPECT_EQ(order.client_count(), 0u);
  order.Enter(1, "waits", 1e9);
  for (FairOrder::Id id = 2; id <= 5000; ++id) {
    order.Enter(id, absl::StrCat("client-", id), 1);
    order.Serve(id);
  }
  EXPECT_LE(order.client_count(), FairOrder::kMaxClients + 1);
  order.Serve(2);  // has no place: nothing
  order.Leave(2);
}

}  // namespace
}  // namespace ringattn::server
