#include "server/edge/secret.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

TEST(SecretTest, Equality) {
  EXPECT_TRUE(EqualSecrets("abc", "abc"));
  EXPECT_FALSE(EqualSecrets("abc", "abd"));
  EXPECT_FALSE(EqualSecrets("abc", "ab"));
  EXPECT_FALSE(EqualSecrets("", "a"));
}

}  // namespace
}  // namespace ringattn::server
