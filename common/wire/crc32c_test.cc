#include "common/wire/crc32c.h"

#include <string>

#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

TEST(Crc32c, StandardValues) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(Crc32c("", 0), 0u);
  // RFC 3720, B.4: 32 bytes of zeros, and of ones.
  EXPECT_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xff').data(), 32), 0x62A8AB43u);
}

TEST(Crc32c, PiecesGiveTheWhole) {
  std::string bytes(100'000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 + (i >> 8));
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  std::vector<Fragment> fragments;
  for (size_t at = 0, piece = 0; at < bytes.size(); at += piece) {
    piece = std::min(bytes.size() - at, piece + 1000);
    fragments.push_back({reinterpret_cast<const uint8_t*>(bytes.data()) + at, piece});
    fragments.push_back({nullptr, 0});
  }
  EXPECT_EQ(Crc32c(fragments), whole);
  std::string copy(bytes.size(), '\0');
  EXPECT_EQ(CopyFragmentsAndCrc32c(fragments, copy.data()), whole);
  EXPECT_EQ(copy, bytes);
}

}  // namespace
}  // namespace ringattn::wire
