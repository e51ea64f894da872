// Strangers and hostile peers: what they send must neither delay a ring nor harm its ranks.
#include "worker/comm/wire/wire_forming.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "absl/time/clock.h"
#include "common/security/token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/sockets/socket_address.h"
#include "worker/comm/wire/wire_frame.h"
#include "worker/comm/wire/wire_listener.h"
#include "worker/comm/wire/wire_ring_transport.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;
using Kind = PeerTransfer::Kind;

constexpr int64_t kBlockBytes = int64_t{16} << 20;

// A connection of a stranger, in blocking mode.
class Stranger {
 public:
  explicit Stranger(const std::string& blob) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_storage address{};
    const socklen_t length = ToSockaddr(ParseWireBlob(blob)->address, &address);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), length), 0);
    const timeval limit{10, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~Stranger() { close(fd_); }
  Stranger(const Stranger&) = delete;

  void Send(const std::string& bytes) {
    (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  std::string Receive(size_t bytes) {
    std::string text(bytes, '\0');
    const ssize_t got = recv(fd_, text.data(), bytes, MSG_WAITALL);
    text.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return text;
  }

 private:
  const int fd_;
};

// Two honest ranks, of which rank 1 connects to rank 0 when Finish is called.
class HonestRing {
 public:
  explicit HonestRing(absl::Duration handshake_timeout = absl::Seconds(5))
      : a_({.handshake_timeout = handshake_timeout, .counters = counters}), b_({}) {
    blobs = {*a_.Prepare(1, 0, 2), *b_.Prepare(1, 1, 2)};
    connecting_ = std::thread([this] { result_ = a_.Connect(1, blobs, Soon()).status(); });
  }
  ~HonestRing() {
    if (connecting_.joinable()) Finish();
  }

  void Finish() {
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(b_.Connect(1, blobs, Soon()).ok());
    connecting_.join();
    EXPECT_TRUE(result_.ok()) << result_;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(3));
  }
  int64_t refused(WireFailure failure) const {
    return counters->refused[static_cast<size_t>(failure)].load();
  }
  void AwaitRefused(WireFailure failure, int64_t count) const {
    const absl::Time give_up = absl::Now() + absl::Seconds(20);
    while (refused(failure) < count && absl::Now() < give_up) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    EXPECT_GE(refused(failure), count) << WireFailureName(failure);
  }

  const std::shared_ptr<WireCounters> counters = std::make_shared<WireCounters>();
  std::vector<std::string> blobs;

 private:
  WireRingTransport a_, b_;
  std::thread connecting_;
  absl::Status result_;
};

TEST(WireForming, SilentConnectionsDelayNobody) {
  HonestRing ring;
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(std::make_unique<Stranger>(ring.blobs[0]));
  // More than 66 at a time are not kept.
  ring.AwaitRefused(WireFailure::kLimit,
                    200 - WireForming::kSpareHandshakes - kDefaultWireConnections);
  ring.Finish();
}

TEST(WireForming, HandshakesHaveATimeLimit) {
  HonestRing ring(absl::Milliseconds(100));
  Stranger silent(ring.blobs[0]);
  EXPECT_EQ(silent.Receive(1), "");
  EXPECT_EQ(ring.refused(WireFailure::kTimeout), 1);
}

TEST(WireForming, RefusesGarbageWrongTokensAndEarlyClose) {
  HonestRing ring;
  {
    Stranger garbage(ring.blobs[0]);
    garbage.Send(std::string(1000, 'x'));
    EXPECT_EQ(garbage.Receive(1), "");
    ring.AwaitRefused(WireFailure::kProtocol, 1);
  }
  {
    Stranger early(ring.blobs[0]);
    early.Send("RAWIRE01");
  }
  ring.AwaitRefused(WireFailure::kClosed, 1);
  Stranger guessing(ring.blobs[0]);
  WireHandshake handshake = WireHandshake::Connector({1, 1, RandomToken(), ""}, 0, 0);
  guessing.Send(handshake.TakeOutput());
  EXPECT_EQ(guessing.Receive(handshake.wanted()).size(), handshake.wanted());
  guessing.Send(RandomToken());
  EXPECT_EQ(guessing.Receive(1), "");
  ring.AwaitRefused(WireFailure::kToken, 1);
}

// Rank 0 is a communicator. Rank 1 is hostile: it knows the token, but not the protocol. Rank 2 is
// honest.
class HostilePeer {
 public:
  explicit HostilePeer(absl::Duration step_timeout = absl::Minutes(1)) {
    WireRingTransport a({.connections = 2, .step_timeout = step_timeout, .counters = counters});
    WireRingTransport c({.connections = 2, .step_timeout = step_timeout});
    const std::unique_ptr<WireListener> listener = *WireListener::Open("127.0.0.1");
    const WireBlob own{.stripes = 2, .address = listener->address(), .secret = RandomToken()};
    const std::vector<std::string> blobs = {*a.Prepare(1, 0, 3), FormatWireBlob(own),
                                            *c.Prepare(1, 2, 3)};
    std::vector<WireBlob> parsed;
    for (const std::string& blob : blobs) parsed.push_back(*ParseWireBlob(blob));
    const int never = eventfd(0, 0);
    std::thread first([&] { rank0 = *a.Connect(1, blobs, Soon()); });
    std::thread third([&] { rank2 = *c.Connect(1, blobs, Soon()); });
    WireForming forming({.generation = 1,
                         .rank = 1,
                         .blobs = parsed,
                         .peers = {0, 2},
                         .listener = listener->fd(),
                         .cancelled = never,
                         .tls = nullptr,
                         .counters = std::make_shared<WireCounters>()});
    streams = *forming.Run(Soon());
    first.join();
    third.join();
    close(never);
  }

  // Sends bytes to rank 0.
  void Send(std::string bytes, int stripe = 0) {
    const absl::Time give_up = absl::Now() + absl::Seconds(10);
    while (!bytes.empty() && absl::Now() < give_up) {
      const iovec part{bytes.data(), bytes.size()};
      const WireStream::Result result = streams[0][stripe]->Write(&part, 1);
      if (!result.ok()) return;
      bytes.erase(0, result.bytes);
    }
  }

  // Rank 0 still exchanges with rank 2.
  void ExpectOthersUnaffected() {
    RunControl controls[2];
    const std::vector<uint8_t> sent = Pattern(kBlockBytes, 2);
    std::vector<uint8_t> source = sent, target(kBlockBytes);
    EventRef receive =
        rank0->Start({{Kind::kReceive, 2, target.data(), kBlockBytes}}, {}, &controls[0]);
    EventRef send = rank2->Start({{Kind::kSend, 0, source.data(), kBlockBytes}}, {}, &controls[1]);
    EXPECT_TRUE(receive->Wait(Soon()).ok()) << receive->Wait(Soon());
    EXPECT_TRUE(send->Wait(Soon()).ok());
    EXPECT_TRUE(target == sent);
  }
  int64_t lost(WireFailure failure) const {
    return counters->lost_peers[static_cast<size_t>(failure)].load();
  }

  const std::shared_ptr<WireCounters> counters = std::make_shared<WireCounters>();
  std::unique_ptr<Communicator> rank0, rank2;
  WireStreams streams;
};

std::string FrameBytes(const WireFrame& frame) {
  std::string bytes;
  AppendFrame(frame, &bytes);
  return bytes;
}

// While rank 0 receives 3 MiB from the hostile rank.
TEST(WireHostilePeer, MalformedBytesEndOnlyItsLink) {
  constexpr auto kData = WireFrame::Kind::kData;
  constexpr uint64_t kTotal = 3 << 20;
  const std::string chunk(kChunkBytes, 'c');
  WireFrame whole{.kind = kData, .length = kChunkBytes, .total = kTotal};
  WireFrame oversized = whole;
  oversized.length = 0x7fffffff;
  WireFrame other_size = whole;
  other_size.total = 2 << 20;
  WireFrame unasked = whole;
  unasked.sequence = 1;
  const WireFrame ahead{.kind = WireFrame::Kind::kGrant, .sequence = 5, .total = 1};
  std::string flood;  // small transfers beyond the credit
  for (uint64_t i = 1; i <= 9; ++i) {
    flood += FrameBytes({.kind = kData, .length = 8 << 10, .sequence = i, .total = 8 << 10}) +
             std::string(8 << 10, 'e');
  }
  const std::vector<std::pair<std::string, WireFailure>> attacks = {
      {std::string(64, 'g'), WireFailure::kProtocol},
      {FrameBytes(oversized), WireFailure::kProtocol},
      {FrameBytes(other_size), WireFailure::kSizes},
      {FrameBytes(unasked), WireFailure::kProtocol},
      {FrameBytes(ahead), WireFailure::kProtocol},
      {FrameBytes(whole) + chunk + FrameBytes(whole), WireFailure::kProtocol},
      {flood, WireFailure::kProtocol},
  };
  for (size_t i = 0; i < attacks.size(); ++i) {
    HostilePeer hostile;
    RunControl control;
    std::vector<uint8_t> guarded(kTotal + 16, 0xee);
    EventRef receive =
        hostile.rank0->Start({{Kind::kReceive, 1, guarded.data(), kTotal}}, {}, &control);
    // Its grant shows that the receive has been posted.
    char grant[kFrameBytes];
    while (hostile.streams[0][0]->Read(grant, sizeof(grant)).bytes == 0) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    hostile.Send(attacks[i].first);
    const absl::Status status = receive->Wait(absl::Now() + kAbortBound);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << i << status;
    EXPECT_THAT(Message(status), HasSubstr("lost rank 1: ")) << i;
    EXPECT_EQ(hostile.lost(attacks[i].second), 1) << i << status;
    EXPECT_EQ(std::vector<uint8_t>(guarded.end() - 16, guarded.end()),
              std::vector<uint8_t>(16, 0xee));
    hostile.ExpectOthersUnaffected();
  }
}

TEST(WireHostilePeer, CloseAmidATransferEndsOnlyItsLink) {
  HostilePeer hostile;
  RunControl control;
  std::vector<uint8_t> target(3 << 20);
  EventRef receive =
      hostile.rank0->Start({{Kind::kReceive, 1, target.data(), 3 << 20}}, {}, &control);
  char grant[kFrameBytes];
  while (hostile.streams[0][0]->Read(grant, sizeof(grant)).bytes == 0) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  hostile.Send(
      FrameBytes({.kind = WireFrame::Kind::kData, .length = kChunkBytes, .total = 3 << 20}) +
          std::string(1000, 'c'),
      1);
  hostile.streams[0][1] = nullptr;  // one connection is enough
  const absl::Status status = receive->Wait(absl::Now() + kAbortBound);
  EXPECT_THAT(Message(status), HasSubstr("lost rank 1: the peer closed the connection"));
  hostile.ExpectOthersUnaffected();
}

TEST(WireHostilePeer, PeerThatStopsReadingEndsAtTheTimeout) {
  HostilePeer hostile(absl::Milliseconds(500));
  RunControl control;
  std::vector<uint8_t> block(int64_t{64} << 20);
  const auto bytes = static_cast<int64_t>(block.size());
  hostile.Send(FrameBytes({.kind = WireFrame::Kind::kGrant, .total = block.size()}));
  EventRef send = hostile.rank0->Start({{Kind::kSend, 1, block.data(), bytes}}, {}, &control);
  const absl::Status status = send->Wait(absl::Now() + kAbortBound);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), HasSubstr("sending to rank 1 took longer than 500ms"));
  EXPECT_EQ(hostile.lost(WireFailure::kTimeout), 1);
  hostile.ExpectOthersUnaffected();
}

TEST(WireHostilePeer, AbortDoesNotWaitForAPeerThatStopsReading) {
  HostilePeer hostile;
  RunControl control;
  std::vector<uint8_t> block(int64_t{64} << 20);
  hostile.Send(FrameBytes({.kind = WireFrame::Kind::kGrant, .total = block.size()}));
  EventRef send = hostile.rank0->Start(
      {{Kind::kSend, 1, block.data(), static_cast<int64_t>(block.size())}}, {}, &control);
  EXPECT_FALSE(send->Wait(absl::Now() + absl::Milliseconds(200)).ok());
  const absl::Time begin = absl::Now();
  hostile.rank0->Abort("torn down");
  EXPECT_LT(absl::Now() - begin, absl::Milliseconds(500));
  EXPECT_THAT(Message(send->Wait(begin + kAbortBound)), HasSubstr("torn down"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

}  // namespace
}  // namespace ringattn::worker
