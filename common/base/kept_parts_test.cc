#include "common/base/kept_parts.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Optional;

absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

class KeptPartsTest : public testing::Test {
 protected:
  KeptParts<int> parts_{{.max_count = 3, .max_bytes = 100, .lease = absl::Seconds(30)}};
};

TEST_F(KeptPartsTest, GivesEachPartOnceAndOnlyForItsRecipe) {
  EXPECT_THAT(parts_.Keep("a", 10, 1, At(0)), IsEmpty());
  EXPECT_THAT(parts_.Keep("a", 10, 2, At(1)), IsEmpty());
  EXPECT_EQ(parts_.bytes(), 20);
  EXPECT_EQ(parts_.Take("b", At(2)), std::nullopt);
  EXPECT_THAT(parts_.Take("a", At(2)), Optional(2));
  EXPECT_THAT(parts_.Take("a", At(2)), Optional(1));
  EXPECT_EQ(parts_.Take("a", At(2)), std::nullopt);
  EXPECT_EQ(parts_.bytes(), 0);
  EXPECT_EQ(parts_.counts().hits, 2);
  EXPECT_EQ(parts_.counts().misses, 2);
}

TEST_F(KeptPartsTest, BoundsDropTheOldest) {
  for (int part = 1; part <= 3; ++part) parts_.Keep("a", 10, part, At(part));
  EXPECT_THAT(parts_.Keep("a", 10, 4, At(4)), ElementsAre(1));  // count
  EXPECT_THAT(parts_.Keep("a", 90, 5, At(5)), ElementsAre(2, 3));
  EXPECT_EQ(parts_.bytes(), 100);
  EXPECT_THAT(parts_.Keep("a", 101, 6, At(6)), ElementsAre(6));  // alone too large
  EXPECT_EQ(parts_.count(), 2);
  EXPECT_EQ(parts_.counts().evictions, 3);
}

TEST_F(KeptPartsTest, EvictsAsMuchAsIsNeeded) {
  for (int part = 1; part <= 3; ++part) parts_.Keep("a", 10, part, At(part));
  EXPECT_THAT(parts_.Evict(11), ElementsAre(1, 2));
  EXPECT_THAT(parts_.Evict(100), ElementsAre(3));
  EXPECT_THAT(parts_.Evict(1), IsEmpty());
  EXPECT_EQ(parts_.bytes(), 0);
}

TEST_F(KeptPartsTest, KeepsNothingBeyondItsLease) {
  parts_.Keep("a", 10, 1, At(0));
  parts_.Keep("a", 10, 2, At(10));
  EXPECT_THAT(parts_.Take("a", At(40)), std::nullopt);
  EXPECT_THAT(parts_.Expire(At(29)), IsEmpty());
  EXPECT_THAT(parts_.Expire(At(30)), ElementsAre(1));
  EXPECT_THAT(parts_.Take("a", At(39)), Optional(2));
  parts_.Keep("a", 10, 2, At(39));  // the lease begins again
  EXPECT_THAT(parts_.Expire(At(68)), IsEmpty());
  EXPECT_EQ(parts_.counts().expiries, 1);
  EXPECT_EQ(parts_.counts().evictions, 0);
}

TEST_F(KeptPartsTest, HoldsMakeLeasesLonger) {
  parts_.Keep("a", 10, 1, At(0));
  parts_.Keep("b", 10, 2, At(0));
  EXPECT_THAT(parts_.Hold("a", At(100)), Optional(10));
  EXPECT_EQ(parts_.Hold("c", At(100)), std::nullopt);
  EXPECT_THAT(parts_.BytesOf("a"), Optional(10));
  EXPECT_EQ(parts_.BytesOf("c"), std::nullopt);
  EXPECT_THAT(parts_.Expire(At(30)), ElementsAre(2));
  EXPECT_THAT(parts_.Take("a", At(99)), Optional(1));
  parts_.Keep("a", 10, 1, At(99));  // beyond the hold
  EXPECT_THAT(parts_.Expire(At(100)), IsEmpty());
  EXPECT_EQ(parts_.holds(), 0);
  EXPECT_THAT(parts_.Expire(At(129)), ElementsAre(1));
}

TEST_F(KeptPartsTest, HoldsApplyToPartsThatFollow) {
  EXPECT_EQ(parts_.Hold("a", At(100)), std::nullopt);
  EXPECT_EQ(parts_.Hold("a", At(50)), std::nullopt);  // never shorter
  parts_.Keep("a", 10, 1, At(0));
  parts_.Keep("b", 10, 2, At(1));
  EXPECT_THAT(parts_.Expire(At(99)), ElementsAre(2));
  EXPECT_EQ(parts_.count(), 1);
}

TEST_F(KeptPartsTest, HoldsAreBoundedAndNoReservations) {
  for (const char* recipe : {"a", "b", "c", "d"}) parts_.Hold(recipe, At(recipe[0]));
  EXPECT_EQ(parts_.holds(), 3);  // without "a", which ended first
  parts_.Keep("d", 90, 1, At(0));
  EXPECT_THAT(parts_.Keep("x", 90, 2, At(1)), ElementsAre(1));
  EXPECT_THAT(parts_.Evict(1), ElementsAre(2));
  parts_.Clear();
  EXPECT_EQ(parts_.holds(), 0);
}

TEST_F(KeptPartsTest, ClearDropsEverything) {
  parts_.Keep("a", 10, 1, At(0));
  parts_.Keep("b", 10, 2, At(0));
  EXPECT_THAT(parts_.Clear(), ElementsAre(1, 2));
  EXPECT_EQ(parts_.count(), 0);
  EXPECT_EQ(parts_.bytes(), 0);
}

TEST(KeptPartsOfPointersTest, MovesParts) {
  KeptParts<std::unique_ptr<int>> parts({.max_count = 1, .max_bytes = 1});
  parts.Keep("a", 1, std::make_unique<int>(7), At(0));
  EXPECT_EQ(parts.Take("a", At(-1)).value() != nullptr, true);
}

TEST(KeptPartsWithoutRoomTest, KeepNothing) {
  KeptParts<int> parts({.max_count = 0, .max_bytes = 100, .lease = absl::Seconds(1)});
  EXPECT_THAT(parts.Keep("a", 1, 1, At(0)), ElementsAre(1));
}

}  // namespace
}  // namespace ringattn
