#include "worker/comm/sockets/socket_address.h"

#include <arpa/inet.h>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(SocketAddress, SurvivesTheWayThroughAMessage) {
  for (const char* text : {"127.0.0.2", "10.1.2.3", "::1", "2001:db8::7"}) {
    sockaddr_storage given{};
    const bool v6 = std::string(text).find(':') != std::string::npos;
    socklen_t length = 0;
    if (v6) {
      auto* address = reinterpret_cast<sockaddr_in6*>(&given);
      address->sin6_family = AF_INET6;
      address->sin6_port = htons(0x1234);
      ASSERT_EQ(inet_pton(AF_INET6, text, &address->sin6_addr), 1);
      length = sizeof(*address);
    } else {
      auto* address = reinterpret_cast<sockaddr_in*>(&given);
      address->sin_family = AF_INET;
      address->sin_port = htons(0x1234);
      ASSERT_EQ(inet_pton(AF_INET, text, &address->sin_addr), 1);
      length = sizeof(*address);
    }
    const SocketAddress value = FromSockaddr(given);
    EXPECT_EQ(value.port, 0x1234) << text;
    EXPECT_EQ(IN6_IS_ADDR_V4MAPPED(&value.ip), !v6) << text;
    sockaddr_storage back{};
    EXPECT_EQ(ToSockaddr(value, &back), length) << text;
    EXPECT_EQ(back.ss_family, v6 ? AF_INET6 : AF_INET) << text;
    EXPECT_EQ(IpText(back, length), text);
    EXPECT_EQ(FromSockaddr(back).port, 0x1234) << text;
  }
}

TEST(SocketAddress, SurvivesTheWayThroughText) {
  for (const char* text : {"127.0.0.2:1", "10.1.2.3:65535", "[::1]:7710", "[2001:db8::7]:80"}) {
    sockaddr_storage address{};
    const socklen_t length = ParseSocketText(text, &address);
    ASSERT_GT(length, 0u) << text;
    EXPECT_EQ(SocketText(address, length), text);
  }
}

TEST(SocketAddress, OnlyNumericAddressesWithAPortAreParsed) {
  sockaddr_storage address{};
  for (const char* text : {"", ":", "127.0.0.1", "localhost:80", "127.0.0.1:http",
                           "127.0.0.1:80:90", "[::1:80", "no.numeric.host:1"}) {
    EXPECT_EQ(ParseSocketText(text, &address), 0u) << text;
  }
}

}  // namespace
}  // namespace ringattn::worker
