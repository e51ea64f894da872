#include "common/wire/message_buffer.h"

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <grpcpp/support/slice.h>

#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

grpc::ByteBuffer BufferOf(const std::string& text) {
  const grpc::Slice slice(text);
  return {&slice, 1};
}

std::string TextOf(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

static_assert(std::is_nothrow_move_constructible_v<MessageBuffer>);
static_assert(std::is_nothrow_move_assignable_v<MessageBuffer>);

TEST(MessageBuffer, MovesLeaveTheSourceEmpty) {
  MessageBuffer first = BufferOf("one");
  MessageBuffer second = std::move(first);
  EXPECT_FALSE(first.get().Valid());  // NOLINT(bugprone-use-after-move): this is what is tested
  EXPECT_EQ(TextOf(second), "one");
  MessageBuffer third = BufferOf("two");
  third = std::move(second);
  EXPECT_FALSE(second.get().Valid());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(TextOf(third), "one");
}

TEST(MessageBuffer, CopiesAreIndependent) {
  const MessageBuffer first = BufferOf("one");
  MessageBuffer second = first;
  second = BufferOf("two");
  EXPECT_EQ(TextOf(first), "one");
  EXPECT_EQ(TextOf(second), "two");
  second = first;
  EXPECT_EQ(TextOf(second), "one");
}

TEST(MessageBuffer, VectorsKeepTheContents) {
  std::vector<MessageBuffer> all;
  for (int i = 0; i < 20; ++i) all.push_back(BufferOf(std::string(1000, 'a' + i)));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(TextOf(all[i]), std::string(1000, 'a' + i));
}

}  // namespace
}  // namespace ringattn::wire
