#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "worker/device/staging.h"

namespace ringattn::worker {
namespace {

TEST(HostUpload, AppendsInOrderAndCompletesAtOnce) {
  std::string target(10, '.');
  auto upload = MakeHostUpload({{target.data() + 2, 5}});
  ASSERT_TRUE(upload->Append("abc", 3).ok());
  ASSERT_TRUE(upload->Append(nullptr, 0).ok());
  ASSERT_TRUE(upload->Append("de", 2).ok());
  auto events = upload->Finish();
  ASSERT_TRUE(events.ok());
  EXPECT_TRUE(events->empty());
  EXPECT_EQ(target, "..abcde...");
}

TEST(HostUpload, FillsTargetsInOrder) {
  std::string first(2, '.'), third(5, '.');
  auto upload = MakeHostUpload({{first.data(), 2}, {nullptr, 0}, {third.data() + 1, 3}});
  ASSERT_TRUE(upload->Append("abcd", 4).ok());
  ASSERT_TRUE(upload->Append("e", 1).ok());
  ASSERT_TRUE(upload->Finish().ok());
  EXPECT_EQ(first, "ab");
  EXPECT_EQ(third, ".cde.");
}

TEST(HostDownload, BorrowsInOrderAndNeverAcrossRanges) {
  const std::string first = "abcde", third = "fg";
  auto download = MakeHostDownload({{first.data(), 5}, {nullptr, 0}, {third.data(), 2}});
  struct Expected {
    size_t range;
    int64_t offset;
    const char* data;
    int64_t bytes;
  };
  for (const Expected& expected :
       {Expected{0, 0, first.data(), 3}, Expected{0, 3, first.data() + 3, 2},
        Expected{2, 0, third.data(), 2}}) {
    EXPECT_FALSE(download->finished());
    auto piece = download->Next(3);
    ASSERT_TRUE(piece.ok() && piece->has_value());
    EXPECT_EQ((*piece)->range, expected.range);
    EXPECT_EQ((*piece)->offset, expected.offset);
    EXPECT_EQ(static_cast<const void*>((*piece)->data), expected.data) << "no copy";
    EXPECT_EQ((*piece)->bytes, expected.bytes);
    EXPECT_EQ((*piece)->keeper, nullptr);
  }
  EXPECT_TRUE(download->finished());
  EXPECT_FALSE((*download->Next(3)).has_value());
}

TEST(HostDownload, EmptyDownloadIsFinished) {
  EXPECT_TRUE(MakeHostDownload({})->finished());
  EXPECT_TRUE(MakeHostDownload({{nullptr, 0}})->finished());
}

}  // namespace
}  // namespace ringattn::worker
