#include "common/security/token.h"

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(TokenTest, RandomOnesDiffer) {
  EXPECT_EQ(RandomToken().size(), kTokenBytes);
  EXPECT_NE(RandomToken(), RandomToken());
}

// RFC 4231, test case 2.
TEST(TokenTest, DerivedOnesAreHmacSha256) {
  EXPECT_EQ(absl::BytesToHexString(DeriveToken("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(TokenTest, EverySeedAndEveryUseHasItsOwn) {
  const std::string seed = RandomToken();
  EXPECT_EQ(DeriveToken(seed, "1-1 0"), DeriveToken(seed, "1-1 0"));
  EXPECT_NE(DeriveToken(seed, "1-1 0"), DeriveToken(seed, "1-1 1"));
  EXPECT_NE(DeriveToken(seed, "1-1 0"), DeriveToken(seed, "2-1 0"));
  EXPECT_NE(DeriveToken(seed, "1-1 0"), DeriveToken(RandomToken(), "1-1 0"));
}

}  // namespace
}  // namespace ringattn
