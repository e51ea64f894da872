#include "common/security/bearer_token.h"

#include <string>

#include "common/security/call_capture.h"
#include "common/security/credentials.h"
#include "common/security/test_certificates.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(BearerToken, IsReadForEachCallAndKeptWhileTheFileIsBad) {
  const std::string path = PutFile("token", "  the-first-of-them\n");
  const auto token = BearerToken::FromFile(path);
  ASSERT_TRUE(token.ok()) << token.status();
  const TransportSecurity off;
  std::string seen;
  const CallCapture server(off.ServerCredentials(), [&](const grpc::ServerContextBase& context) {
    const auto value = context.client_metadata().find(kAuthorizationKey);
    EXPECT_EQ(context.client_metadata().count(kAuthorizationKey), 1);
    seen = std::string(value->second.data(), value->second.size());
    return grpc::Status::OK;
  });
  const auto shown = [&] {
    server.Call(off.ChannelCredentials(), {},
                [&](grpc::ClientContext* context) { (*token)->AddTo(context); });
    return seen;
  };
  EXPECT_EQ(shown(), "Bearer the-first-of-them");
  PutFile("token", "the-second-of-them");
  EXPECT_EQ(shown(), "Bearer the-second-of-them");
  PutFile("token", "short");
  EXPECT_EQ(shown(), "Bearer the-second-of-them");
  std::remove(path.c_str());
  EXPECT_EQ(shown(), "Bearer the-second-of-them");
}

TEST(BearerToken, ErrorsNameTheFileAndNotWhatItHolds) {
  EXPECT_EQ(BearerToken::FromFile("/no/token").status().message(),
            "/no/token: cannot read the token");
  const std::string path = PutFile("token", "shh");
  EXPECT_EQ(BearerToken::FromFile(path).status().message(),
            path + ": a token has 16 to 1024 printable characters without spaces");
}

TEST(IsToken, TakesWhatAHeaderCanCarry) {
  EXPECT_TRUE(IsToken("0123456789abcdef"));
  EXPECT_TRUE(IsToken(std::string(1024, '~')));
  EXPECT_FALSE(IsToken("0123456789abcde"));
  EXPECT_FALSE(IsToken(std::string(1025, 'x')));
  EXPECT_FALSE(IsToken("0123456789 abcdef"));
  EXPECT_FALSE(IsToken("0123456789abcdef\n"));
  EXPECT_FALSE(IsToken("0123456789abcde\xc3\xa4"));
}

}  // namespace
}  // namespace ringattn
