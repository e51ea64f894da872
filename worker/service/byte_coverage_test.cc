#include "worker/service/byte_coverage.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

TEST(ByteCoverage, CompleteOnceEveryByteCameOnce) {
  ByteCoverage coverage(10);
  EXPECT_TRUE(coverage.Add(4, 3).ok());
  EXPECT_TRUE(coverage.Add(0, 4).ok());
  EXPECT_TRUE(coverage.Add(9, 1).ok());
  EXPECT_FALSE(coverage.complete());
  EXPECT_TRUE(coverage.Add(7, 2).ok());
  EXPECT_TRUE(coverage.complete());
  EXPECT_EQ(coverage.Add(3, 1).code(), kInvalid);
}

TEST(ByteCoverage, AnEmptyTensorIsCompleteFromTheStart) {
  ByteCoverage coverage(0);
  EXPECT_TRUE(coverage.complete());
  EXPECT_TRUE(coverage.Add(0, 0).ok());
  EXPECT_EQ(coverage.Add(0, 1).code(), kInvalid);
}

TEST(ByteCoverage, OutsideAndOverflowAreRefused) {
  ByteCoverage coverage(10);
  EXPECT_EQ(coverage.Add(10, 1).code(), kInvalid);
  EXPECT_EQ(coverage.Add(8, 3).code(), kInvalid);
  EXPECT_EQ(coverage.Add(~uint64_t{0}, 1).code(), kInvalid);
  EXPECT_EQ(coverage.Add(2, ~uint64_t{0}).code(), kInvalid);
  EXPECT_EQ(coverage.Add(11, 0).code(), kInvalid);
  EXPECT_TRUE(coverage.Add(10, 0).ok());
  EXPECT_TRUE(coverage.Add(0, 10).ok()) << "refused ranges must leave no mark";
}

TEST(ByteCoverage, EveryKindOfOverlapIsRefused) {
  for (auto [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {20, 10}, {19, 2}, {29, 2}, {22, 3}, {10, 30}, {0, 100}}) {
    ByteCoverage coverage(100);
    ASSERT_TRUE(coverage.Add(20, 10).ok());
    EXPECT_EQ(coverage.Add(offset, bytes).code(), kInvalid) << offset << " + " << bytes;
    EXPECT_TRUE(coverage.Add(10, 10).ok());
    EXPECT_TRUE(coverage.Add(30, 10).ok());
  }
}

// Against a vector of flags, over random chunks of a small tensor.
TEST(ByteCoverage, AgreesWithABitmap) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const int size = 1 + random() % 60;
    ByteCoverage coverage(size);
    std::vector<bool> flags(size);
    for (int i = 0; i < 60; ++i) {
      const int begin = random() % size, bytes = random() % (size - begin) / 4 + 1;
      const bool taken = std::any_of(flags.begin() + begin, flags.begin() + begin + bytes,
                                     [](bool flag) { return flag; });
      EXPECT_EQ(coverage.Add(begin, bytes).ok(), !taken);
      std::fill_n(flags.begin() + begin, taken ? 0 : bytes, true);
      EXPECT_EQ(coverage.complete(), std::count(flags.begin(), flags.end(), true) == size);
    }
  }
}

}  // namespace
}  // namespace ringattn::worker
