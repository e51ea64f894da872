// The contract of transports over sockets: where they listen.
#include <arpa/inet.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;
using Kind = PeerTransfer::Kind;

class AddressContract : public RingTest {};
class SocketContract : public RingTest {};

INSTANTIATE_TEST_SUITE_P(Rings, AddressContract, ::testing::ValuesIn(RingsUnderTest()), RingName);
INSTANTIATE_TEST_SUITE_P(Rings, SocketContract, ::testing::ValuesIn(RingsUnderTest()), RingName);

constexpr int kEstablished = 1, kListen = 10;  // states in /proc/net/tcp

// Counts this machine's TCP sockets with this local IPv4 address and state.
int SocketsAt(const std::string& address, int state) {
  std::ifstream table("/proc/self/net/tcp");
  const std::string local = absl::StrFormat(" %08X:", inet_addr(address.c_str()));
  const std::string wanted = absl::StrFormat(" %02X ", state);
  int count = 0;
  for (std::string line; std::getline(table, line);) {
    const size_t colon = line.find(':');  // after the line's number
    if (colon == std::string::npos || line.compare(colon + 1, local.size(), local) != 0) continue;
    // Local and remote address, each with a port, then the state.
    const size_t remote = line.find(' ', colon + 2);
    if (line.compare(line.find(' ', remote + 1), wanted.size(), wanted) == 0) ++count;
  }
  return count;
}

// An address of this test process. Other processes may use the usual loopback addresses.
std::string OwnAddress(int rank) {
  const int id = getpid();
  return absl::StrCat("127.", 100 + rank, ".", id / 250 % 250, ".", 1 + id % 250);
}

TEST_P(AddressContract, ListensOnLocalAddressesOnly) {
  const auto transport = GetParam().make_transport("192.0.2.1", absl::Minutes(1));
  const absl::Status status = transport->Prepare(1, 0, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("cannot listen for ring peers on 192.0.2.1: "));
}

TEST_P(AddressContract, RejectsAddressesThatPeersCannotConnectTo) {
  for (const std::string host : {"", "0.0.0.0", "::"}) {
    const auto transport = GetParam().make_transport(host, absl::Minutes(1));
    const absl::Status status = transport->Prepare(1, 0, 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << host;
    EXPECT_THAT(Message(status), HasSubstr(absl::StrCat("the ring address is \"", host, "\"")));
  }
}

// Each rank has another address. Peers find it by the blob.
TEST_P(AddressContract, ListensAtItsAddressUntilTheRingIsFormed) {
  if (inet_addr(GetParam().host.c_str()) == INADDR_NONE) GTEST_SKIP() << "counts IPv4 sockets";
  std::vector<std::unique_ptr<RingTransport>> transports;
  std::vector<std::string> blobs;
  for (int rank : {0, 1}) {
    transports.push_back(GetParam().make_transport(OwnAddress(rank), absl::Minutes(1)));
    EXPECT_EQ(SocketsAt(OwnAddress(rank), kListen), 0);
    absl::StatusOr<std::string> blob = transports[rank]->Prepare(1, rank, 2);
    ASSERT_TRUE(blob.ok()) << blob.status();
    blobs.push_back(*std::move(blob));
    EXPECT_GT(SocketsAt(OwnAddress(rank), kListen), 0);
  }
  Ring ring(2);
  std::thread other([&] {
    if (auto joined = transports[1]->Connect(1, blobs, Soon()); joined.ok()) {
      ring[1] = *std::move(joined);
    }
  });
  auto joined = transports[0]->Connect(1, blobs, Soon());
  if (joined.ok()) ring[0] = *std::move(joined);
  other.join();
  ASSERT_TRUE(Formed(ring));
  for (int rank : {0, 1}) EXPECT_EQ(SocketsAt(OwnAddress(rank), kListen), 0);
  EXPECT_GT(SocketsAt(OwnAddress(0), kEstablished) + SocketsAt(OwnAddress(1), kEstablished), 0);
  RunControl controls[2];
  std::vector<uint8_t> a = Pattern(1000, 1), b(1000);
  EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), 1000}}, {}, &controls[0]);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), 1000}}, {}, &controls[1]);
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_TRUE(a == b);
}

TEST_P(SocketContract, AbortReachesPeerDuringTransfer) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  Ranks ranks = MakeRanks(2);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  Memory a(ranks[0], kBytes), b(ranks[1], kBytes);
  EventRef other = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
  EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
  EventRef behind = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
  // Aborts in the middle, when some of the data has arrived.
  const absl::Time begin = absl::Now();
  while (controls[1].progress.load() == 0 && absl::Now() < begin + kAbortBound) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ring[0]->Abort("rank 1 was lost");
  EXPECT_EQ(behind->Wait(absl::Now() + kAbortBound).code(), absl::StatusCode::kUnavailable);
  // The peer notices, or had received everything before.
  EXPECT_NE(other->Wait(absl::Now() + kAbortBound).code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace ringattn::worker
