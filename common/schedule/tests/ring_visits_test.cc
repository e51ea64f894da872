#include "common/schedule/route/ring_visits.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

bool Always(int, int) { return true; }

// "(0,1)<0[0,0] (1,0)<0[0,1]": distance, sender's visit, and the visits of the transfer.
std::string Text(const std::vector<RingVisit>& visits) {
  std::string text;
  for (const RingVisit& visit : visits) {
    if (visit.outer + visit.inner == 0) continue;
    absl::StrAppend(&text, text.empty() ? "" : " ", "(", visit.outer, ",", visit.inner, ")<",
                    visit.sender, "[", visit.fetch_begin, ",", visit.fetch_end, "]");
  }
  return text;
}

TEST(RingVisitsTest, OneGroupIsAFlatRing) {
  for (VisitOrder order : {VisitOrder::kByRound, VisitOrder::kCollectorsLast}) {
    EXPECT_EQ(Text(OrderVisits(1, 4, order, Always)), "(0,1)<0[0,0] (0,2)<1[1,1] (0,3)<2[2,2]");
  }
}

TEST(RingVisitsTest, AnOuterHopTakesARound) {
  EXPECT_EQ(Text(OrderVisits(3, 2, VisitOrder::kByRound, Always)),
            "(0,1)<0[0,0] (1,0)<0[0,1] (1,1)<2[2,2] (2,0)<2[2,3] (2,1)<4[4,4]");
}

// Collectors compute last in their round, and the second part of round 0 comes last of all.
TEST(RingVisitsTest, CollectorsFollowTheirChains) {
  const std::vector<RingVisit> visits = OrderVisits(2, 4, VisitOrder::kCollectorsLast, Always);
  EXPECT_EQ(Text(visits),
            "(0,1)<0[0,0] (1,1)<5[1,1] (1,2)<2[2,2] (1,3)<3[3,3] (1,0)<0[0,0] "
            "(0,2)<0[5,5] (0,3)<6[6,6]");
  EXPECT_EQ(visits[1].chain_next, 6);  // (0,1) hands its gradients to (0,2)
  EXPECT_EQ(visits[2].chain_next, 3);
  EXPECT_EQ(visits[4].chain_next, RingVisit::kNone);
  EXPECT_EQ(visits[4].collector, 5);
  EXPECT_EQ(visits[7].collector, 0);
  EXPECT_EQ(visits[5].sum_arrives, 8);  // while owners compute on their own blocks
}

TEST(RingVisitsTest, ASumArrivesWhileTheNextCollectorComputes) {
  const std::vector<RingVisit> visits = OrderVisits(3, 2, VisitOrder::kCollectorsLast, Always);
  EXPECT_EQ(Text(visits), "(0,1)<0[0,0] (1,1)<3[1,1] (1,0)<0[0,0] (2,1)<5[3,3] (2,0)<3[1,2]");
  EXPECT_EQ(visits[3].sum_arrives, 5);
  EXPECT_EQ(visits[5].sum_arrives, 6);
}

// For every number of groups and ranks, and any visits left out: a block is there before it is used
// or passed on, and outer hops do not overlap.
TEST(RingVisitsTest, BlocksArriveBeforeTheyAreUsed) {
  for (int groups = 1; groups <= 5; ++groups) {
    for (int size = 1; size <= 6; ++size) {
      for (int rounds = 1; rounds <= groups; ++rounds) {
        for (int reach = 1; reach <= size; ++reach) {
          for (VisitOrder order : {VisitOrder::kByRound, VisitOrder::kCollectorsLast}) {
            const auto used = [&](int outer, int inner) { return outer < rounds && inner < reach; };
            const std::vector<RingVisit> visits = OrderVisits(groups, size, order, used);
            int free_from = 0;
            for (int k = 1; k < static_cast<int>(visits.size()); ++k) {
              const RingVisit& visit = visits[k];
              const std::string where =
                  absl::StrCat(groups, " x ", size, " visit ", k, ": ", Text(visits));
              ASSERT_LE(visit.fetch_begin, visit.fetch_end) << where;
              ASSERT_LT(visit.fetch_end, k) << where;
              ASSERT_GE(visit.fetch_begin, 0) << where;
              if (visit.sender > 0) {
                ASSERT_LT(visits[visit.sender].fetch_end, visit.fetch_begin) << where;
              }
              if (!visit.is_outer_hop()) continue;
              ASSERT_GE(visit.fetch_begin, free_from) << where;
              free_from = visit.fetch_end + 1;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
