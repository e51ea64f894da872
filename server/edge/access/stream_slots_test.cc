#include "server/edge/access/stream_slots.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

Limits MakeLimits() {
  Limits limits;
  limits.max_queued_requests = 4;  // 8 slots with a header
  limits.max_streams_without_header = 3;
  limits.max_streams_per_client = 6;
  limits.max_streams_per_connection = 4;
  return limits;
}

Caller Anonymous(const std::string& connection) { return {"", connection, connection}; }

Caller Known(const std::string& principal, const std::string& connection) {
  return {principal, connection, principal};
}

TEST(StreamSlotsTest, TheOldestWithoutAHeaderIsEvicted) {
  StreamSlots places(MakeLimits());
  for (StreamId id = 1; id <= 3; ++id) {
    EXPECT_EQ(places.Enter(id, Anonymous("a")), ExhaustedLimit::kNone);
    EXPECT_EQ(places.TakeEvicted(), std::nullopt);
  }
  EXPECT_EQ(places.HeaderCame(1), ExhaustedLimit::kNone);
  EXPECT_EQ(places.Enter(4, Anonymous("b")), ExhaustedLimit::kNone);
  EXPECT_EQ(places.TakeEvicted(), std::nullopt);  // 2, 3 and 4
  EXPECT_EQ(places.Enter(5, Anonymous("b")), ExhaustedLimit::kNone);
  EXPECT_EQ(places.TakeEvicted(), StreamId{2});
  EXPECT_EQ(places.TakeEvicted(), std::nullopt) << "named once";
  EXPECT_EQ(places.Enter(6, Anonymous("b")), ExhaustedLimit::kNone);
  EXPECT_EQ(places.TakeEvicted(), StreamId{3}) << "although the first has not left yet";
}

TEST(StreamSlotsTest, StreamsWithoutHeadersLockOutNoClient) {
  StreamSlots places(MakeLimits());
  StreamId id = 0;
  for (int i = 0; i < 100; ++i) {
    places.Enter(++id, Anonymous("attacker " + std::to_string(i)));
    while (const auto evicted = places.TakeEvicted()) places.Leave(*evicted);
    EXPECT_LE(places.without_header(), 3);
    ASSERT_EQ(places.Enter(++id, Anonymous("honest")), ExhaustedLimit::kNone);
    ASSERT_EQ(places.HeaderCame(id), ExhaustedLimit::kNone);
    places.Leave(id);
  }
}

TEST(StreamSlotsTest, EachConnectionHasItsLimit) {
  StreamSlots places(MakeLimits());
  for (StreamId id = 1; id <= 4; ++id) {
    EXPECT_EQ(places.Enter(id, Anonymous("a")), ExhaustedLimit::kNone);
    EXPECT_EQ(places.HeaderCame(id), ExhaustedLimit::kNone);
  }
  EXPECT_EQ(places.Enter(5, Anonymous("a")), ExhaustedLimit::kConnection);
  EXPECT_EQ(places.Enter(6, Anonymous("b")), ExhaustedLimit::kNone);
  places.Leave(2);
  EXPECT_EQ(places.Enter(7, Anonymous("a")), ExhaustedLimit::kNone);
}

TEST(StreamSlotsTest, APrincipalHasOneLimitOnAllItsConnections) {
  StreamSlots places(MakeLimits());
  for (StreamId id = 1; id <= 6; ++id) {
    EXPECT_EQ(places.Enter(id, Known("alice", id % 2 == 0 ? "a" : "b")), ExhaustedLimit::kNone);
    EXPECT_EQ(places.HeaderCame(id), ExhaustedLimit::kNone);
  }
  EXPECT_EQ(places.Enter(7, Known("alice", "c")), ExhaustedLimit::kClient);
  EXPECT_EQ(places.Enter(8, Known("bob", "c")), ExhaustedLimit::kNone);
}

TEST(StreamSlotsTest, RequestsAreBoundedAndLeavingFreesSlots) {
  StreamSlots places(MakeLimits());
  StreamId id = 0;
  for (int i = 0; i < 8; ++i) {
    places.Enter(++id, Anonymous("c" + std::to_string(i)));
    EXPECT_EQ(places.HeaderCame(id), ExhaustedLimit::kNone);
  }
  places.Enter(++id, Anonymous("late"));
  EXPECT_EQ(places.HeaderCame(id), ExhaustedLimit::kServer);
  places.Leave(id);
  places.Leave(1);
  places.Leave(1);  // a second Leave has no effect
  places.Enter(++id, Anonymous("late"));
  EXPECT_EQ(places.HeaderCame(id), ExhaustedLimit::kNone);
}

}  // namespace
}  // namespace ringattn::server
