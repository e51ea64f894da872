#include "common/local_memory/attach_protocol.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

const std::string kToken = "0123456789abcdef";

TEST(AttachProtocolTest, ClientMessagesKeepWhatTheySay) {
  const auto attach = ReadClientMessage(Encode(AttachMessage{kToken}));
  ASSERT_TRUE(attach.has_value());
  EXPECT_EQ(std::get<AttachMessage>(*attach).token, kToken);
  const auto fence = ReadClientMessage(Encode(FenceMessage{0xfedcba9876543210u}));
  ASSERT_TRUE(fence.has_value());
  EXPECT_EQ(std::get<FenceMessage>(*fence).number, 0xfedcba9876543210u);
}

// So that another language can write it down.
TEST(AttachProtocolTest, TheirBytesAreFixed) {
  EXPECT_EQ(Encode(AttachMessage{kToken}), std::string("\1\0\0\0\1\0\0\0", 8) + kToken);
  EXPECT_EQ(Encode(FenceMessage{258}), std::string("\1\0\0\0\2\0\0\0\2\1\0\0\0\0\0\0", 16));
  EXPECT_EQ(Encode(WorkerAnswer{AttachCode::kNoSuchToken, "no"}),
            std::string("\1\0\0\0\2\0\0\0no", 10));
}

TEST(AttachProtocolTest, OtherFormsAreNotRead) {
  EXPECT_FALSE(ReadClientMessage("").has_value());
  EXPECT_FALSE(ReadClientMessage("\1").has_value());
  const std::string good = Encode(AttachMessage{kToken});
  EXPECT_FALSE(ReadClientMessage(good.substr(0, good.size() - 1)).has_value());
  EXPECT_FALSE(ReadClientMessage(good + "x").has_value());
  std::string other_version = good;
  other_version[0] = 2;
  EXPECT_FALSE(ReadClientMessage(other_version).has_value());
  std::string other_kind = good;
  other_kind[4] = 9;
  EXPECT_FALSE(ReadClientMessage(other_kind).has_value());
}

TEST(AttachProtocolTest, AnswersKeepWhatTheySay) {
  const auto refused = ReadWorkerAnswer(Encode(WorkerAnswer{AttachCode::kCannotMap, "why"}));
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->code, AttachCode::kCannotMap);
  EXPECT_EQ(refused->words, "why");
  const auto fenced = ReadWorkerAnswer(Encode(WorkerAnswer{AttachCode::kFenced, "", 7}));
  ASSERT_TRUE(fenced.has_value());
  EXPECT_EQ(fenced->number, 7u);
  const std::string longest =
      Encode(WorkerAnswer{AttachCode::kCannotMap, std::string(10'000, 'x')});
  EXPECT_EQ(longest.size(), kMaxAttachDatagramBytes);
  EXPECT_FALSE(ReadWorkerAnswer("\1\0\0").has_value());
}

}  // namespace
}  // namespace ringattn
