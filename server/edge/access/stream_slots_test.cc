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
  StreamSlots slots(MakeLimits());
  for (StreamId id = 1; id <= 3; ++id) {
    EXPECT_EQ(slots.Enter(id, Anonymous("a")), ExhaustedLimit::kNone);
    EXPECT_EQ(slots.TakeEvicted(), std::nullopt);
  }
  EXPECT_EQ(slots.HeaderCame(1), ExhaustedLimit::kNone);
  EXPECT_EQ(slots.Enter(4, Anonymous("b")), ExhaustedLimit::kNone);
  EXPECT_EQ(slots.TakeEvicted(), std::nullopt);  // 2, 3 and 4
  EXPECT_EQ(slots.Enter(5, Anonymous("b")), ExhaustedLimit::kNone);
  EXPECT_EQ(slots.TakeEvicted(), StreamId{2});
  EXPECT_EQ(slots.TakeEvicted(), std::nullopt) << "named once";
  EXPECT_EQ(slots.Enter(6, Anonymous("b")), ExhaustedLimit::kNone);
  EXPECT_EQ(slots.TakeEvicted(), StreamId{3}) << "although the first has not left yet";
}

TEST(StreamSlotsTest, StreamsWithoutHeadersLockOutNoClient) {
  StreamSlots slots(MakeLimits());
  StreamId id = 0;
  for (int i = 0; i < 100; ++i) {
    slots.Enter(++id, Anonymous("attacker " + std::to_string(i)));
    while (const auto evicted = slots.TakeEvicted()) slots.Leave(*evicted);
    EXPECT_LE(slots.without_header(), 3);
    ASSERT_EQ(slots.Enter(++id, Anonymous("honest")), ExhaustedLimit::kNone);
    ASSERT_EQ(slots.HeaderCame(id), ExhaustedLimit::kNone);
    slots.Leave(id);
  }
}

TEST(StreamSlotsTest, EachConnectionHasItsLimit) {
  StreamSlots slots(MakeLimits());
  for (StreamId id = 1; id <= 4; ++id) {
    EXPECT_EQ(slots.Enter(id, Anonymous("a")), ExhaustedLimit::kNone);
    EXPECT_EQ(slots.HeaderCame(id), ExhaustedLimit::kNone);
  }
  EXPECT_EQ(slots.Enter(5, Anonymous("a")), ExhaustedLimit::kConnection);
  EXPECT_EQ(slots.Enter(6, Anonymous("b")), ExhaustedLimit::kNone);
  slots.Leave(2);
  EXPECT_EQ(slots.Enter(7, Anonymous("a")), ExhaustedLimit::kNone);
}

TEST(StreamSlotsTest, APrincipalHasOneLimitOnAllItsConnections) {
  StreamSlots slots(MakeLimits());
  for (StreamId id = 1; id <= 6; ++id) {
    EXPECT_EQ(slots.Enter(id, Known("alice", id % 2 == 0 ? "a" : "b")), ExhaustedLimit::kNone);
    EXPECT_EQ(slots.HeaderCame(id), ExhaustedLimit::kNone);
  }
  EXPECT_EQ(slots.Enter(7, Known("alice", "c")), ExhaustedLimit::kClient);
  EXPECT_EQ(slots.Enter(8, Known("bob", "c")), ExhaustedLimit::kNone);
}

TEST(StreamSlotsTest, RequestsAreBoundedAndLeavingFreesSlots) {
  StreamSlots slots(MakeLimits());
  StreamId id = 0;
  for (int i = 0; i < 8; ++i) {
    slots.Enter(++id, Anonymous("c" + std::to_string(i)));
    EXPECT_EQ(slots.HeaderCame(id), ExhaustedLimit::kNone);
  }
  slots.Enter(++id, Anonymous("late"));
  EXPECT_EQ(slots.HeaderCame(id), ExhaustedLimit::kServer);
  slots.Leave(id);
  slots.Leave(1);
  slots.Leave(1);  // a second Leave has no effect
  slots.Enter(++id, Anonymous("late"));
  EXPECT_EQ(slots.HeaderCame(id), ExhaustedLimit::kNone);
}

}  // namespace
}  // namespace ringattn::server
