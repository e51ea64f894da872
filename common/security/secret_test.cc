#include "common/security/secret.h"

#include <string>

#include "common/security/call_capture.h"
#include "common/security/credentials.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(SecretsEqual, ComparesAllBytesAndTheLength) {
  EXPECT_TRUE(SecretsEqual("", ""));
  EXPECT_TRUE(SecretsEqual("abc", "abc"));
  EXPECT_FALSE(SecretsEqual("abc", "abd"));
  EXPECT_FALSE(SecretsEqual("abc", "bbc"));
  EXPECT_FALSE(SecretsEqual("abc", "ab"));
  EXPECT_FALSE(SecretsEqual("", "a"));
  EXPECT_FALSE(SecretsEqual(absl::string_view("a\0b", 3), absl::string_view("a\0c", 3)));
  const std::string long_one(1024, 'x');
  EXPECT_TRUE(SecretsEqual(long_one, std::string(long_one)));
  EXPECT_FALSE(SecretsEqual(long_one, long_one + "x"));
}

TEST(CheckSecret, WantsTheSecretExactlyOnce) {
  const std::string secret = "0123456789abcdef";
  const TransportSecurity off;
  const CallCapture server(off.ServerCredentials(), [&](const grpc::ServerContextBase& context) {
    return CheckSecret(context, secret);
  });
  const auto code = [&](const std::vector<std::pair<std::string, std::string>>& metadata) {
    return server.Call(off.ChannelCredentials(), metadata).error_code();
  };
  EXPECT_EQ(code({{kSecretMetadataKey, secret}}), grpc::StatusCode::OK);
  EXPECT_EQ(code({}), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(code({{kSecretMetadataKey, "0123456789abcdeX"}}), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(code({{kSecretMetadataKey, ""}}), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(code({{kSecretMetadataKey, secret}, {kSecretMetadataKey, secret}}),
            grpc::StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace ringattn
