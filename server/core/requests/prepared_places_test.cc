#include "server/core/requests/prepared_places.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using testing::ElementsAre;
using testing::IsNull;
using testing::Pointee;

absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

TEST(PreparedPlaces, AreOfOnePrincipalAndOneRecipe) {
  PreparedPlaces places;
  places.Note("alice", 7, {3, 4}, At(30));
  EXPECT_THAT(places.Find("alice", 7, At(0)), Pointee(ElementsAre(3, 4)));
  EXPECT_THAT(places.Find("bob", 7, At(0)), IsNull());
  EXPECT_THAT(places.Find("alice", 8, At(0)), IsNull());
  places.Note("alice", 7, {5}, At(10));
  EXPECT_THAT(places.Find("alice", 7, At(9)), Pointee(ElementsAre(5)));
  EXPECT_THAT(places.Find("alice", 7, At(10)), IsNull());
  places.Clear();
  EXPECT_THAT(places.Find("alice", 7, At(0)), IsNull());
}

TEST(PreparedPlaces, OfUnknownRecipesAreNotNoted) {
  PreparedPlaces places;
  places.Note("alice", 0, {3}, At(30));
  EXPECT_THAT(places.Find("alice", 0, At(0)), IsNull());
}

TEST(PreparedPlaces, ForgetTheOneThatEndsFirst) {
  PreparedPlaces places;
  for (size_t i = 1; i <= PreparedPlaces::kMaxPlaces + 1; ++i) {
    places.Note("alice", i, {i}, At(i == 5 ? 1 : 100));
  }
  EXPECT_EQ(places.size(), PreparedPlaces::kMaxPlaces);
  EXPECT_THAT(places.Find("alice", 5, At(0)), IsNull());
  EXPECT_THAT(places.Find("alice", 1, At(0)), Pointee(ElementsAre(1)));
}

}  // namespace
}  // namespace ringattn::server
