// Flow control without sockets. Two links exchange frames through this program.
#include "worker/comm/wire/wire_link.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;
using Kind = PeerTransfer::Kind;
using FrameKind = WireFrame::Kind;
using Transfers = std::vector<PeerTransfer>;

constexpr auto kChunk = static_cast<int64_t>(kChunkBytes);

// One end of a link, with the group of its transfers.
struct LinkEnd {
  explicit LinkEnd(Transfers transfers, bool runs_ahead = true)
      : posted(std::move(transfers)), link(runs_ahead) {
    group.Begin(posted, &progress);
  }
  WireTransfer* operator[](size_t i) { return &group.transfers()[i]; }

  Transfers posted;
  std::atomic<int64_t> progress{0};
  int ended_groups = 0;
  WireGroup group{[this] { ++ended_groups; }};
  WireLink link;
};

WireFrame Grant(uint64_t sequence, int64_t total) {
  return {.kind = FrameKind::kGrant, .sequence = sequence, .total = static_cast<uint64_t>(total)};
}

WireFrame Data(uint64_t sequence, int64_t offset, int64_t length, int64_t total) {
  return {.kind = FrameKind::kData,
          .length = static_cast<uint32_t>(length),
          .sequence = sequence,
          .offset = static_cast<uint64_t>(offset),
          .total = static_cast<uint64_t>(total)};
}

// Sends one chunk. Returns false if there is none for this stripe.
bool Pass(LinkEnd& from, LinkEnd& to, int stripe) {
  const WireChunk chunk = from.link.TakeChunk(stripe);
  if (chunk.transfer == nullptr) return false;
  const absl::StatusOr<char*> target = to.link.OnData(stripe, chunk.frame);
  EXPECT_TRUE(target.ok()) << target.status();
  if (!target.ok()) return false;
  std::copy_n(chunk.data, chunk.frame.length, *target);
  EXPECT_TRUE(to.link.OnDataEnd(chunk.frame).ok());
  from.group.Move(chunk.transfer, chunk.frame.length);
  return true;
}

TEST(WireLink, SendsWaitForTheirGrant) {
  const int64_t bytes = 2 * kChunk + 5;
  std::vector<uint8_t> a = Pattern(bytes, 1), b(bytes);
  LinkEnd sender(Transfers{{Kind::kSend, 1, a.data(), bytes}}),
      receiver(Transfers{{Kind::kReceive, 0, b.data(), bytes}});
  ASSERT_TRUE(sender.link.PostSend(sender[0]).ok());
  EXPECT_FALSE(Pass(sender, receiver, 0));
  EXPECT_EQ(sender.link.ChunksForOthers(), 0);
  WireFrame grant;
  ASSERT_TRUE(receiver.link.PostReceive(receiver[0], &grant).ok());
  EXPECT_EQ(grant.total, bytes);
  ASSERT_TRUE(sender.link.OnGrant(grant).ok());
  EXPECT_EQ(sender.link.ChunksForOthers(), 2);
  // Any connection may carry a chunk.
  for (const int stripe : {2, 0, 1}) EXPECT_TRUE(Pass(sender, receiver, stripe));
  EXPECT_FALSE(Pass(sender, receiver, 0));
  EXPECT_TRUE(a == b);
  for (LinkEnd* end : {&sender, &receiver}) {
    EXPECT_TRUE(end->group.ended());
    EXPECT_TRUE(end->group.Result().ok());
    EXPECT_EQ(end->ended_groups, 1);
    EXPECT_EQ(end->progress.load(), 1);
  }
}

// With staging, a send needs device memory at the other end.
TEST(WireLink, SmallSendsWaitForTheirGrantIfToldTo) {
  std::vector<uint8_t> a = Pattern(8, 1), b(8);
  LinkEnd sender(Transfers{{Kind::kSend, 1, a.data(), 8}}, /*runs_ahead=*/false),
      receiver(Transfers{{Kind::kReceive, 0, b.data(), 8}}, /*runs_ahead=*/false);
  ASSERT_TRUE(sender.link.PostSend(sender[0]).ok());
  EXPECT_FALSE(Pass(sender, receiver, 0));
  EXPECT_EQ(receiver.link.OnData(0, Data(0, 0, 8, 8)).status().code(),
            absl::StatusCode::kInvalidArgument);
  WireFrame grant;
  ASSERT_TRUE(receiver.link.PostReceive(receiver[0], &grant).ok());
  ASSERT_TRUE(sender.link.OnGrant(grant).ok());
  EXPECT_TRUE(Pass(sender, receiver, 0));
  EXPECT_TRUE(a == b);
}

TEST(WireLink, SmallSendsRunAheadOnTheFirstConnectionWithinTheirCredit) {
  constexpr int64_t kBytes = WireLink::kEagerBytes;
  constexpr int kWithinCredit = WireLink::kEagerCredit / kBytes;
  std::vector<uint8_t> a = Pattern((kWithinCredit + 1) * kBytes, 1), b(a.size());
  Transfers sends, receives;
  for (int i = 0; i <= kWithinCredit; ++i) {
    sends.push_back({Kind::kSend, 1, a.data() + i * kBytes, kBytes});
    receives.push_back({Kind::kReceive, 0, b.data() + i * kBytes, kBytes});
  }
  LinkEnd sender(sends), receiver(receives);
  for (size_t i = 0; i < sends.size(); ++i) ASSERT_TRUE(sender.link.PostSend(sender[i]).ok());
  EXPECT_FALSE(Pass(sender, receiver, 1));
  for (int i = 0; i < kWithinCredit; ++i) EXPECT_TRUE(Pass(sender, receiver, 0)) << i;
  EXPECT_FALSE(Pass(sender, receiver, 0));
  // Each grant returns the credit of one transfer.
  for (size_t i = 0; i < receives.size(); ++i) {
    WireFrame grant;
    ASSERT_TRUE(receiver.link.PostReceive(receiver[i], &grant).ok());
    ASSERT_TRUE(sender.link.OnGrant(grant).ok());
  }
  EXPECT_TRUE(Pass(sender, receiver, 0));
  EXPECT_TRUE(receiver.group.ended());
  EXPECT_TRUE(a == b);
}

TEST(WireLink, OneByteMoreThanEagerWaits) {
  std::vector<uint8_t> a(WireLink::kEagerBytes + 1);
  LinkEnd sender(Transfers{{Kind::kSend, 1, a.data(), static_cast<int64_t>(a.size())}});
  ASSERT_TRUE(sender.link.PostSend(sender[0]).ok());
  EXPECT_EQ(sender.link.TakeChunk(0).transfer, nullptr);
}

TEST(WireLink, ReceivesMayBePostedWhileTheirBytesArrive) {
  std::vector<uint8_t> a = Pattern(100, 1), b(100);
  LinkEnd receiver(Transfers{{Kind::kReceive, 0, b.data(), 100}});
  const WireFrame frame = Data(0, 0, 100, 100);
  const absl::StatusOr<char*> target = receiver.link.OnData(0, frame);
  ASSERT_TRUE(target.ok());
  WireFrame grant;
  ASSERT_TRUE(receiver.link.PostReceive(receiver[0], &grant).ok());
  EXPECT_FALSE(receiver.link.OnData(1, frame).ok());  // again
  std::copy(a.begin(), a.end(), *target);
  ASSERT_TRUE(receiver.link.OnDataEnd(frame).ok());
  EXPECT_TRUE(receiver.group.ended());
  EXPECT_TRUE(a == b);
}

TEST(WireLink, GrantsMayArriveBeforeTheirSends) {
  std::vector<uint8_t> a(100);
  LinkEnd sender(Transfers{{Kind::kSend, 1, a.data(), 100}});
  ASSERT_TRUE(sender.link.OnGrant(Grant(0, 100)).ok());
  ASSERT_TRUE(sender.link.PostSend(sender[0]).ok());
  EXPECT_EQ(sender.link.TakeChunk(3).frame.length, 100);
}

TEST(WireLink, RanksMustAgreeOnSizes) {
  std::vector<uint8_t> a(100);
  WireFrame grant;
  const auto expect = [](const absl::Status& status, const std::string& detail) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(Message(status), detail);
  };
  {
    LinkEnd sender(Transfers{{Kind::kSend, 1, a.data(), 100}});
    ASSERT_TRUE(sender.link.OnGrant(Grant(0, 99)).ok());
    expect(sender.link.PostSend(sender[0]), "it expects 99 bytes, but 100 are to be sent");
  }
  {
    LinkEnd sender(Transfers{{Kind::kSend, 1, a.data(), 100}});
    ASSERT_TRUE(sender.link.PostSend(sender[0]).ok());
    expect(sender.link.OnGrant(Grant(0, 99)), "it expects 99 bytes, but 100 are to be sent");
  }
  {
    LinkEnd receiver(Transfers{{Kind::kReceive, 0, a.data(), 100}});
    ASSERT_TRUE(receiver.link.PostReceive(receiver[0], &grant).ok());
    expect(receiver.link.OnData(0, Data(0, 0, 99, 99)).status(),
           "it sent 99 bytes, but 100 are expected");
  }
  {
    LinkEnd receiver(Transfers{{Kind::kReceive, 0, a.data(), 100}});
    ASSERT_TRUE(receiver.link.OnData(0, Data(0, 0, 99, 99)).ok());
    expect(receiver.link.PostReceive(receiver[0], &grant),
           "it sent 99 bytes, but 100 are expected");
    EXPECT_EQ(grant.total, 100);  // the peer finds the mistake, too
  }
}

TEST(WireLink, RejectsWhatTheProtocolForbids) {
  const int64_t bytes = 2 * kChunk;
  std::vector<uint8_t> b(bytes);
  LinkEnd receiver(Transfers{{Kind::kReceive, 0, b.data(), bytes}});
  WireFrame grant;
  ASSERT_TRUE(receiver.link.PostReceive(receiver[0], &grant).ok());
  const auto rejects = [](const absl::Status& status, const std::string& detail) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(Message(status), HasSubstr(detail));
  };
  ASSERT_TRUE(receiver.link.OnData(1, Data(0, kChunk, kChunk, bytes)).ok());
  rejects(receiver.link.OnData(0, Data(0, kChunk, kChunk, bytes)).status(), "chunk 1 came twice");
  const int64_t eager = WireLink::kEagerBytes;
  rejects(receiver.link.OnData(0, Data(1, 0, eager + 1, eager + 1)).status(), "exceed what");
  rejects(receiver.link.OnData(1, Data(1, 0, eager, eager)).status(), "exceed what");
  for (int i = 1; i <= WireLink::kEagerCredit / eager; ++i) {
    EXPECT_TRUE(receiver.link.OnData(0, Data(i, 0, eager, eager)).ok()) << i;
  }
  rejects(receiver.link.OnData(0, Data(1, 0, eager, eager)).status(), "exceed what");
  rejects(receiver.link.OnData(0, Data(9, 0, 1, 1)).status(), "exceed what");
  rejects(receiver.link.OnGrant(Grant(1, 5)), "grant 1 instead of 0");
}

TEST(WireLink, BoundsGrantsAhead) {
  LinkEnd sender(Transfers{});
  absl::Status status;
  uint64_t grants = 0;
  while (status.ok() && grants < (1 << 20)) status = sender.link.OnGrant(Grant(grants++, 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(grants, WireLink::kMaxGrantsAhead + 1);
}

TEST(WireLink, AFailedLinkTakesAndSendsNothing) {
  std::vector<uint8_t> a(100), b(100);
  LinkEnd end(Transfers{{Kind::kSend, 1, a.data(), 100}, {Kind::kReceive, 1, b.data(), 100}});
  WireFrame grant;
  ASSERT_TRUE(end.link.PostSend(end[0]).ok());
  ASSERT_TRUE(end.link.PostReceive(end[1], &grant).ok());
  const WireFrame frame = Data(0, 0, 100, 100);
  ASSERT_TRUE(end.link.OnData(0, frame).ok());
  end.link.Fail(WireFailure::kReset, absl::UnavailableError("lost rank 1: reset"));
  EXPECT_TRUE(end.link.failed());
  EXPECT_EQ(end.link.TakeChunk(0).transfer, nullptr);
  EXPECT_EQ(end.link.ChunksForOthers(), 0);
  for (const absl::Status& status :
       {end.link.OnGrant(Grant(0, 100)), end.link.OnData(0, Data(1, 0, 1, 1)).status(),
        end.link.OnDataEnd(frame)}) {
    EXPECT_EQ(Message(status), "lost rank 1: reset");
  }
  // Connections may still use the transfers' memory.
  EXPECT_FALSE(end.group.ended());
}

}  // namespace
}  // namespace ringattn::worker
