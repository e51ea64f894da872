#include "common/wire/packed_messages.h"

#include <deque>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::wire {
namespace {

using testing::ElementsAre;

v1::JoinResponse Drop(const std::string& reason) {
  v1::JoinResponse message;
  message.mutable_leave()->set_reason(reason);
  return message;
}

std::vector<std::string> Apart(v1::JoinResponse packed) {
  std::vector<std::string> reasons;
  TakeApart(std::move(packed), [&](v1::JoinResponse message, bool is_last) {
    EXPECT_EQ(message.more_size(), 0);
    reasons.push_back(message.leave().reason() + (is_last ? "." : ""));
  });
  return reasons;
}

TEST(PackedMessages, KeepTheirOrder) {
  std::deque<v1::JoinResponse> queue{Drop("a"), Drop("b"), Drop("c")};
  EXPECT_THAT(Apart(TakePacked(queue)), ElementsAre("a", "b", "c."));
  EXPECT_TRUE(queue.empty());
  queue.push_back(Drop("d"));
  const v1::JoinResponse single = TakePacked(queue);
  EXPECT_EQ(single.more_size(), 0);
  EXPECT_THAT(Apart(single), ElementsAre("d."));
}

TEST(PackedMessages, HaveALimitedSize) {
  const std::string large(kPackedBytes / 2, 'x');
  std::deque<v1::JoinResponse> queue{Drop(large), Drop(large), Drop("c")};
  EXPECT_THAT(Apart(TakePacked(queue)), ElementsAre(large + "."));
  EXPECT_THAT(Apart(TakePacked(queue)), ElementsAre(large, "c."));
}

TEST(PackedMessages, ALargeMessageTravelsAlone) {
  std::deque<v1::JoinResponse> queue{Drop("a"), Drop(std::string(10 * kPackedBytes, 'x')),
                                     Drop("c")};
  EXPECT_THAT(Apart(TakePacked(queue)), ElementsAre("a."));
  EXPECT_EQ(TakePacked(queue).more_size(), 0);
  EXPECT_THAT(Apart(TakePacked(queue)), ElementsAre("c."));
}

}  // namespace
}  // namespace ringattn::wire
