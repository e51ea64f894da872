// Rings over sockets beyond the contract (worker/comm/contract), which they fulfil in plain text
// and with TLS, with one connection per pair and with several.
#include "worker/comm/wire/wire_ring_transport.h"

#include <sys/socket.h>

#include <thread>

#include "absl/time/clock.h"
#include "common/security/test_certificates.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/host_ranks.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/sockets/owned_fd.h"
#include "worker/comm/sockets/socket_address.h"
#include "worker/comm/wire/wire_blob.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;
using Kind = PeerTransfer::Kind;

TlsMaterial MaterialOf(const TestAuthority& issuer, const TestAuthority& trusted) {
  const TestCertificate issued = issuer.Issue("worker");
  return {.identity_pem = issued.key + issued.certificate, .authorities_pem = trusted.pem()};
}

RingUnderTest WireRing(const std::string& name, int connections, bool tls = false,
                       const std::string& host = "127.0.0.1") {
  RingUnderTest ring;
  ring.name = name;
  ring.isolates_peers = true;
  ring.host = host;
  std::optional<TlsMaterial> material;
  if (tls) {
    const TestAuthority authority("cluster");
    material = MaterialOf(authority, authority);
  }
  ring.make_transport = [=](const std::string& at, absl::Duration step_timeout) {
    return std::make_unique<WireRingTransport>(
        WireTransportOptions{.host = at,
                             .connections = connections,
                             .tls = [material] { return material; },
                             .step_timeout = step_timeout});
  };
  ring.make_ranks = [host, make = ring.make_transport](const TestRankOptions& options) {
    return MakeHostRanks(options, [&](int) { return make(host, options.step_timeout); });
  };
  return ring;
}

// Connects two transports and returns rank 0's and rank 1's result.
std::vector<absl::Status> Join(RingTransport& a, RingTransport& b, absl::Duration patience) {
  const std::vector<std::string> blobs = {*a.Prepare(1, 0, 2), *b.Prepare(1, 1, 2)};
  std::vector<absl::Status> results(2);
  std::thread other([&] { results[1] = b.Connect(1, blobs, absl::Now() + patience).status(); });
  results[0] = a.Connect(1, blobs, absl::Now() + patience).status();
  other.join();
  return results;
}

TEST(WireRing, AbortReachesPeersWithoutATransferHere) {
  Ranks ranks(WireRing("wire", 2), {});
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory b(ranks[1], 100);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), 100}}, {}, &control);
  ring[0]->Abort("torn down");
  EXPECT_THAT(Message(receive->Wait(absl::Now() + kAbortBound)), HasSubstr("lost rank 0"));
}

// Both ranks fail at once, without waiting for the step timeout, and nothing is written outside the
// receive's memory.
TEST(WireRing, SizeMismatchFailsWithoutHarm) {
  for (const auto& [sent, expected] :
       {std::pair(8, 4), std::pair(4, 8), std::pair(100'000, 4), std::pair(4, 100'000)}) {
    Ranks ranks(WireRing("wire", 2), {});
    Ring ring = ranks.Form(1);
    ASSERT_TRUE(Formed(ring));
    RunControl controls[2];
    Memory a(ranks[0], Pattern(sent, 1));
    Memory b(ranks[1], expected + 16);
    EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), sent}}, {}, &controls[0]);
    EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), expected}}, {}, &controls[1]);
    EXPECT_EQ(receive->Wait(absl::Now() + kAbortBound).code(), absl::StatusCode::kUnavailable);
    // A short send is complete before the receiver looks at it; the next one fails.
    const absl::Status status = send->Wait(absl::Now() + kAbortBound);
    if (sent > 8 << 10) {
      EXPECT_THAT(Message(status), HasSubstr("lost rank 1"));
    }
    const std::vector<uint8_t> all = b.Read();
    EXPECT_EQ(std::vector<uint8_t>(all.end() - 16, all.end()), std::vector<uint8_t>(16, 0xee));
  }
}

// Small sends may run ahead of their receives, up to a bound.
TEST(WireRing, SmallSendsRunAheadWithinTheirCredit) {
  Ranks ranks(WireRing("wire", 2), {});
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  constexpr int kBytes = 4096, kCount = 40;
  Memory a(ranks[0], Pattern(kBytes * kCount, 1)), b(ranks[1], kBytes * kCount);
  std::vector<EventRef> sends, receives;
  for (int i = 0; i < kCount; ++i) {
    sends.push_back(
        ring[0]->Start({{Kind::kSend, 1, a.data() + i * kBytes, kBytes}}, {}, &controls[0]));
  }
  // 16 of 4 KiB fit into the credit of 64 KiB.
  EXPECT_TRUE(sends[15]->Wait(Soon()).ok());
  EXPECT_FALSE(sends[16]->Wait(absl::Now() + absl::Milliseconds(50)).ok());
  for (int i = 0; i < kCount; ++i) {
    receives.push_back(
        ring[1]->Start({{Kind::kReceive, 0, b.data() + i * kBytes, kBytes}}, {}, &controls[1]));
  }
  for (int i = 0; i < kCount; ++i) {
    EXPECT_TRUE(sends[i]->Wait(Soon()).ok()) << sends[i]->Wait(Soon());
    EXPECT_TRUE(receives[i]->Wait(Soon()).ok()) << receives[i]->Wait(Soon());
  }
  EXPECT_TRUE(b.Read() == Pattern(kBytes * kCount, 1));
}

TEST(WireRing, CountsBytesAndConnections) {
  auto counters = std::make_shared<WireCounters>();
  WireRingTransport a({.connections = 2, .counters = counters});
  WireRingTransport b({.connections = 3});
  const std::vector<std::string> blobs = {*a.Prepare(1, 0, 2), *b.Prepare(1, 1, 2)};
  std::unique_ptr<Communicator> peer;
  std::thread other([&] { peer = *b.Connect(1, blobs, Soon()); });
  std::unique_ptr<Communicator> own = *a.Connect(1, blobs, Soon());
  other.join();
  EXPECT_EQ(counters->connections.load(), 2);  // the smaller number
  std::vector<char> out(3 << 20), in(100), peer_out(100), peer_in(3 << 20);
  RunControl control;
  EventRef first = own->Start(
      {{Kind::kSend, 1, out.data(), 3 << 20}, {Kind::kReceive, 1, in.data(), 100}}, {}, &control);
  EventRef second = peer->Start(
      {{Kind::kReceive, 0, peer_in.data(), 3 << 20}, {Kind::kSend, 0, peer_out.data(), 100}}, {},
      &control);
  EXPECT_TRUE(first->Wait(Soon()).ok());
  EXPECT_TRUE(second->Wait(Soon()).ok());
  EXPECT_EQ(counters->sent_bytes.load(), 3 << 20);
  EXPECT_EQ(counters->received_bytes.load(), 100);
  peer = nullptr;
  EXPECT_FALSE(own->Start({{Kind::kReceive, 1, in.data(), 100}}, {}, &control)->Wait(Soon()).ok());
  EXPECT_EQ(counters->connections.load(), 0);
  int64_t lost = 0;
  for (const auto& count : counters->lost_peers) lost += count.load();
  EXPECT_EQ(lost, 1);
}

// The blob is what peers connect to.
TEST(WireRing, AnnouncesTheAddressAtWhichItListens) {
  for (const std::string host : {"127.0.0.1", "127.0.77.9", "::1"}) {
    WireRingTransport transport({.host = host});
    sockaddr_storage address{};
    const socklen_t length =
        ToSockaddr(ParseWireBlob(*transport.Prepare(1, 0, 2))->address, &address);
    EXPECT_EQ(IpText(address, length), host);
    const OwnedFd stranger(socket(address.ss_family, SOCK_STREAM, 0));
    EXPECT_EQ(connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), length), 0) << host;
  }
}

TEST(WireRing, RefusesCertificatesOfOtherAuthorities) {
  const TestAuthority cluster("cluster"), other("other");
  const TlsMaterial good = MaterialOf(cluster, cluster), bad = MaterialOf(other, cluster);
  for (const bool bad_connects : {true, false}) {
    auto counters = std::make_shared<WireCounters>();
    WireRingTransport a({.tls = [&] { return bad_connects ? good : bad; }, .counters = counters});
    WireRingTransport b({.tls = [&] { return bad_connects ? bad : good; }});
    const std::vector<absl::Status> results = Join(a, b, absl::Seconds(2));
    EXPECT_EQ(results[0].code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(results[1].code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Message(results[1]), HasSubstr("connecting to rank 0: TLS: "));
    EXPECT_THAT(Message(results[0]), HasSubstr("rank 1 did not connect in time; refused a "
                                               "connection from "));
    EXPECT_THAT(Message(results[0]), HasSubstr("TLS: "));
    EXPECT_THAT(Message(results[bad_connects ? 0 : 1]),
                HasSubstr("unable to get local issuer certificate"));
    EXPECT_GT(counters->refused[static_cast<size_t>(WireFailure::kTls)].load(), 0);
  }
}

TEST(WireRing, NamesTheRankWithoutCertificate) {
  const TestAuthority cluster("cluster");
  const TlsMaterial material = MaterialOf(cluster, cluster);
  WireRingTransport a({.tls = [&] { return material; }});
  WireRingTransport b({});
  const std::vector<absl::Status> results = Join(a, b, absl::Seconds(2));
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(status),
                HasSubstr("rank 1 has no cluster certificate, but rank 0 has one"));
  }
}

}  // namespace

std::vector<RingUnderTest> RingsUnderTest() {
  return {WireRing("one_connection", 1), WireRing("three_connections", 3), WireRing("tls", 2, true),
          WireRing("ipv6", 2, false, "::1")};
}

}  // namespace ringattn::worker
