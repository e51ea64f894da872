#include "worker/comm/sockets/ring_address.h"

#include <fcntl.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

std::string BoundAddress(const std::string& host) {
  const absl::StatusOr<OwnedFd> fd = BindRingAddress(host);
  if (!fd.ok()) return std::string(fd.status().message());
  EXPECT_NE(fcntl(fd->get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  EXPECT_EQ(getsockname(fd->get(), reinterpret_cast<sockaddr*>(&bound), &length), 0);
  EXPECT_NE(FromSockaddr(bound).port, 0);
  return IpText(bound, length);
}

TEST(RingAddress, BindsWhatIsGiven) {
  EXPECT_EQ(BoundAddress("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(BoundAddress("127.0.0.2"), "127.0.0.2");
  EXPECT_EQ(BoundAddress("::1"), "::1");
  EXPECT_THAT(BoundAddress("localhost"), AnyOf("127.0.0.1", "::1"));
}

TEST(RingAddress, RejectsAddressesOfOtherMachinesAndUnknownNames) {
  for (const char* host : {"192.0.2.1", "2001:db8::1", "nowhere.invalid", "127.0.0.1:80"}) {
    const absl::Status status = BindRingAddress(host).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << host;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("cannot listen for ring peers on ", host, ": ")));
    EXPECT_TRUE(CheckRingAddress(host).ok()) << host;
  }
}

TEST(RingAddress, RejectsWildcards) {
  for (const char* host : {"", "0.0.0.0", "0", "::", "0::0", "::ffff:0.0.0.0"}) {
    for (const absl::Status& status : {CheckRingAddress(host), BindRingAddress(host).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << host;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("the ring address is \"", host, "\"; it must be ")));
    }
  }
}

TEST(RingAddress, AnInterfaceHasItsAddress) {
  const absl::StatusOr<std::string> loopback = AddressOfInterface("lo");
  ASSERT_TRUE(loopback.ok()) << loopback.status();
  EXPECT_EQ(*loopback, "127.0.0.1");
  EXPECT_EQ(BoundAddress(*loopback), "127.0.0.1");
}

TEST(RingAddress, AnUnknownInterfaceIsRejectedWithThoseThatExist) {
  for (const char* name : {"", "net7", "127.0.0.1"}) {
    const absl::Status status = AddressOfInterface(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("network interface \"", name, "\" is not up")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("this machine has "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("lo"));
  }
}

}  // namespace
}  // namespace ringattn::worker
