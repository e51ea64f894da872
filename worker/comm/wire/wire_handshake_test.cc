#include "worker/comm/wire/wire_handshake.h"

#include "common/security/token.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

// Passes messages until both ends are done. Returns the first error.
absl::Status Exchange(WireHandshake* connector, WireHandshake* acceptor) {
  for (WireHandshake *from = connector, *to = acceptor; to->wanted() > 0; std::swap(from, to)) {
    const std::string message = from->TakeOutput();
    if (message.size() != to->wanted()) return absl::InternalError("a message is missing");
    if (absl::Status status = to->Take(message); !status.ok()) return status;
  }
  return absl::OkStatus();
}

TEST(WireHandshake, BothEndsProveTheToken) {
  const std::string token = RandomToken();
  WireHandshake connector = WireHandshake::Connector({9, 3, token, "tls"}, 1, 2);
  WireHandshake acceptor = WireHandshake::Acceptor({9, 1, token, "tls"}, 4, 8);
  ASSERT_TRUE(Exchange(&connector, &acceptor).ok());
  EXPECT_EQ(connector.wanted(), 0u);
  EXPECT_EQ(acceptor.peer(), 3);
  EXPECT_EQ(acceptor.stripe(), 2);
}

TEST(WireHandshake, RefusesOtherTokensSessionsAndRings) {
  const std::string token = RandomToken();
  const WireHandshakeOptions own{9, 1, token, "tls"};
  const auto code = [&](const WireHandshakeOptions& other, int peer, int stripe) {
    WireHandshake connector = WireHandshake::Connector(other, peer, stripe);
    WireHandshake acceptor = WireHandshake::Acceptor(own, 4, 8);
    return Exchange(&connector, &acceptor).code();
  };
  EXPECT_EQ(code({9, 3, token, "tls"}, 1, 7), absl::StatusCode::kOk);
  EXPECT_EQ(code({9, 3, RandomToken(), "tls"}, 1, 0), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code({9, 3, token, "another session"}, 1, 0), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code({8, 3, token, "tls"}, 1, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({9, 4, token, "tls"}, 1, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({9, 0, token, "tls"}, 1, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({9, 3, token, "tls"}, 2, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({9, 3, token, "tls"}, 1, 8), absl::StatusCode::kInvalidArgument);
}

// A connector without the token must not learn anything that lets it in, or that it can replay.
TEST(WireHandshake, AcceptorRefusesReplayedAndReflectedProofs) {
  const std::string token = RandomToken();
  WireHandshake connector = WireHandshake::Connector({9, 3, token, ""}, 1, 0);
  WireHandshake first = WireHandshake::Acceptor({9, 1, token, ""}, 4, 8);
  const std::string hello = connector.TakeOutput();
  ASSERT_TRUE(first.Take(hello).ok());
  const std::string answer = first.TakeOutput();
  ASSERT_TRUE(connector.Take(answer).ok());
  const std::string proof = connector.TakeOutput();

  WireHandshake second = WireHandshake::Acceptor({9, 1, token, ""}, 4, 8);
  ASSERT_TRUE(second.Take(hello).ok());
  EXPECT_EQ(second.Take(proof).code(), absl::StatusCode::kPermissionDenied);

  WireHandshake third = WireHandshake::Acceptor({9, 1, token, ""}, 4, 8);
  ASSERT_TRUE(third.Take(hello).ok());
  const std::string reflected = third.TakeOutput();
  EXPECT_EQ(third.Take(reflected.substr(reflected.size() - kTokenBytes)).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(first.Take(proof).ok());
}

TEST(WireHandshake, RefusesOtherProtocols) {
  WireHandshake acceptor = WireHandshake::Acceptor({9, 1, RandomToken(), ""}, 4, 8);
  EXPECT_EQ(acceptor.Take(std::string(acceptor.wanted(), 'x')).code(),
            absl::StatusCode::kInvalidArgument);
  WireHandshake connector = WireHandshake::Connector({9, 3, RandomToken(), ""}, 1, 0);
  EXPECT_EQ(connector.Take(std::string(connector.wanted(), '\0')).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ringattn::worker
