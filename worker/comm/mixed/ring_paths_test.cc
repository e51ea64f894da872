#include "worker/comm/mixed/ring_paths.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/mixed/mixed_blob.h"
#include "worker/comm/peer/peer_blob.h"

namespace ringattn::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = RingPaths::Kind;
using TransferKind = PeerTransfer::Kind;

std::string Uuid(int device) {
  std::string uuid(32, '0');
  uuid[31] = static_cast<char>('a' + device % 6);
  uuid[30] = static_cast<char>('a' + device / 6);
  return uuid;
}

// Every rank uses another GPU, which reaches the GPUs of up to 35 other ranks.
PeerBlob PeerOf(int rank, const std::string& host) {
  PeerBlob blob;
  blob.sharing = PeerSharing::kIpc;
  blob.host_key = host;
  blob.process_id = 100 + rank;
  blob.device_uuid = Uuid(rank);
  for (int other = 0; other < 36; ++other) {
    if (other != rank) blob.reachable_uuids.push_back(Uuid(other));
  }
  blob.place = absl::StrCat("/proc/", blob.process_id, "/fd/7");
  return blob;
}

// `hosts`: a letter per rank; '-': the rank shares no memory.
std::vector<MixedBlob> Ring(const std::string& hosts) {
  std::vector<MixedBlob> blobs;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    const std::string host(1, hosts[rank]);
    blobs.push_back({host == "-" ? "" : EncodePeerBlob(PeerOf(rank, host)), "nccl"});
  }
  return blobs;
}

RingPaths Paths(const std::string& hosts) {
  absl::StatusOr<RingPaths> paths = ChoosePaths(Ring(hosts));
  EXPECT_TRUE(paths.ok()) << paths.status();
  return paths.value_or(RingPaths());
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(MixedBlob, DecodesWhatItEncodes) {
  for (const MixedBlob& blob :
       {MixedBlob{"peer\nblob", std::string("\0n,ccl\n", 7), "wi,re", "host", true, false, true},
        MixedBlob{"", "nccl", "", "", false, true, false, true}, MixedBlob{"peer"}, MixedBlob{},
        MixedBlob{std::string(kMaxMixedPartBytes, 'x'), "1,2\n", "", "h"}}) {
    const absl::StatusOr<MixedBlob> decoded = DecodeMixedBlob(EncodeMixedBlob(blob), 3);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->copies, blob.copies);
    EXPECT_EQ(decoded->nccl, blob.nccl);
    EXPECT_EQ(decoded->wire, blob.wire);
    EXPECT_EQ(decoded->host, blob.host);
    EXPECT_EQ(decoded->tls, blob.tls);
    EXPECT_EQ(decoded->insecure_ring, blob.insecure_ring);
    EXPECT_EQ(decoded->rdma, blob.rdma);
    EXPECT_EQ(decoded->loopback, blob.loopback);
  }
}

TEST(MixedBlob, RejectsOtherTextsByName) {
  const std::string whole = EncodeMixedBlob({"peer", "nccl"});
  const auto error = [](const std::string& text) {
    const absl::Status status = DecodeMixedBlob(text, 3).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    return Message(status);
  };
  EXPECT_THAT(error(""), HasSubstr("rank 3's blob is empty"));
  EXPECT_THAT(error("4,4:peernccl"),
              HasSubstr("rank 3's blob is not that of a GPU worker of this version: it begins "
                        "with \"4,4:peernccl\"; it must begin with \"ringattn-gpu-2\\n\""));
  EXPECT_THAT(error("ringattn-gpu-1\n4,4\npeernccl"), HasSubstr("ringattn-gpu-1"));
  EXPECT_THAT(error(whole.substr(0, whole.size() - 1)),
              HasSubstr("it announces parts of 4, 4, 0, 0 bytes, and 7 bytes follow"));
  EXPECT_THAT(error(whole + "x"), HasSubstr("9 bytes follow"));
  for (const char* numbers :
       {"", "4", "4,4,0,0", "4,4,0,0,", ",4,0,0,0", "4,x,0,0,0", "-1,9,0,0,0", "4,4,0,0,0,0",
        "4,4,0,0,16", "99999999999,1,0,0,0",
        "0000000000000000000000000000000000000000000000000000000000000000004,4,0,0,0"}) {
    EXPECT_THAT(error(absl::StrCat("ringattn-gpu-2\n", numbers, "\npeernccl")),
                HasSubstr("its second line must hold four lengths and flags up to 15"))
        << numbers;
  }
  EXPECT_THAT(error("ringattn-gpu-2\n8,0,0,0,0"), HasSubstr("its second line"));
  EXPECT_THAT(error("ringattn-gpu-2\n4294967295,1,0,0,0\n"), HasSubstr("each part may have 65536"));
  EXPECT_THAT(error("ringattn-gpu-2\n65537,0,0,0,0\n" + std::string(65537, 'x')),
              HasSubstr("each part may have 65536"));
}

TEST(RingPaths, OneMachineUsesCopiesOnly) {
  for (const std::string hosts : {"a", "aa", "aaaaaaaa"}) {
    const RingPaths paths = Paths(hosts);
    EXPECT_EQ(paths.kind, Kind::kCopies) << hosts;
    EXPECT_THAT(paths.across, IsEmpty());
    EXPECT_THAT(paths.within, IsEmpty());
  }
  // Such a ring needs no NCCL.
  std::vector<MixedBlob> blobs = Ring("aa");
  blobs[1].nccl = "";
  EXPECT_TRUE(ChoosePaths(blobs).ok());
}

TEST(RingPaths, RanksWithoutSharedMemoryUseNetworkOnly) {
  for (const std::string hosts : {"-", "--", "a-", "ab", "-a-b"}) {
    EXPECT_EQ(Paths(hosts).kind, Kind::kNetwork) << hosts;
  }
  EXPECT_EQ(Paths("a-").across, "rank 1 does not share memory");
  EXPECT_THAT(Paths("ab").across, HasSubstr("ranks 0 and 1 are not on one machine"));
}

TEST(RingPaths, SeveralMachinesUseBoth) {
  const RingPaths paths = Paths("aabb");
  EXPECT_EQ(paths.kind, Kind::kMixed);
  EXPECT_THAT(paths.island, ElementsAre(0, 0, 1, 1));
  EXPECT_EQ(paths.Islands(), "0-1 2-3");
  EXPECT_THAT(paths.PeersInside(2), ElementsAre(3));
  EXPECT_THAT(paths.PeersOutside(2), ElementsAre(0, 1));
  EXPECT_THAT(paths.across, HasSubstr("ranks 0 and 2 are not on one machine"));
  EXPECT_THAT(paths.within, IsEmpty());

  EXPECT_EQ(Paths("baabba").Islands(), "0,3-4 1-2,5");
  // A rank alone on its machine has no peer inside.
  const RingPaths uneven = Paths("-aab");
  EXPECT_EQ(uneven.kind, Kind::kMixed);
  EXPECT_THAT(uneven.island, ElementsAre(0, 1, 1, 2));
  EXPECT_THAT(uneven.PeersInside(0), IsEmpty());
  EXPECT_THAT(uneven.PeersOutside(3), ElementsAre(0, 1, 2));
}

// One pair that cannot share memory sends its whole machine to NCCL, and no other machine.
TEST(RingPaths, ObstacleWithinMachineAffectsThatMachine) {
  std::vector<MixedBlob> blobs = Ring("aaabbb");
  PeerBlob unreached = PeerOf(4, "b");
  unreached.reachable_uuids = {Uuid(3)};
  blobs[4].copies = EncodePeerBlob(unreached);
  absl::StatusOr<RingPaths> paths = ChoosePaths(blobs);
  ASSERT_TRUE(paths.ok()) << paths.status();
  EXPECT_EQ(paths->kind, Kind::kMixed);
  EXPECT_EQ(paths->Islands(), "0-2 3 4 5");
  EXPECT_EQ(paths->within, "ranks 4 and 5 have GPUs without access to each other");

  blobs = Ring("aa");
  PeerBlob same_gpu = PeerOf(0, "a");
  blobs[1].copies = EncodePeerBlob(same_gpu);
  paths = ChoosePaths(blobs);
  ASSERT_TRUE(paths.ok()) << paths.status();
  EXPECT_EQ(paths->kind, Kind::kNetwork);
  EXPECT_EQ(paths->across, "ranks 0 and 1 are on one GPU");
}

TEST(RingPaths, SharesMemoryInOneWay) {
  std::vector<MixedBlob> blobs = Ring("aaaa");
  for (int rank : {2, 3}) {
    PeerBlob vmm = PeerOf(rank, "a");
    vmm.sharing = PeerSharing::kVmm;
    vmm.place = "@socket";
    vmm.token = std::string(32, 't');
    blobs[rank].copies = EncodePeerBlob(vmm);
  }
  const absl::StatusOr<RingPaths> paths = ChoosePaths(blobs);
  ASSERT_TRUE(paths.ok()) << paths.status();
  EXPECT_EQ(paths->Islands(), "0-1 2-3");
  EXPECT_THAT(paths->across, HasSubstr("share memory in different ways (--peer_memory)"));
}

TEST(RingPaths, LimitsRanksOfOneMachineAndNotOfTheRing) {
  const RingPaths wide = Paths(std::string(kMaxPeerRing, 'a') + std::string(kMaxPeerRing, 'b'));
  EXPECT_EQ(wide.kind, Kind::kMixed);
  EXPECT_EQ(wide.Islands(), "0-15 16-31");
  const RingPaths crowded = Paths(std::string(kMaxPeerRing + 1, 'a'));
  EXPECT_EQ(crowded.kind, Kind::kNetwork);
  EXPECT_EQ(crowded.across, "17 ranks are on the machine of rank 0; at most 16 can share memory");
}

TEST(RingPaths, NamesRankWithoutNetwork) {
  std::vector<MixedBlob> blobs = Ring("aab");
  blobs[2].nccl = "";
  const absl::Status status = ChoosePaths(blobs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(status), HasSubstr("ranks 0 and 2 are not on one machine"));
  EXPECT_THAT(Message(status), HasSubstr("rank 2 has no other transport"));
}

TEST(RingPaths, RejectsMalformedPartByName) {
  std::vector<MixedBlob> blobs = Ring("aab");
  blobs[1].copies = "nonsense";
  const absl::Status status = ChoosePaths(blobs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("rank 1's blob"));
  EXPECT_EQ(ChoosePaths({}).status().code(), absl::StatusCode::kInvalidArgument);
}

// Every rank must get the same result, in any order of machines.
TEST(RingPaths, DependsOnBlobsOnly) {
  const std::vector<MixedBlob> blobs = Ring("abcabc-");
  const RingPaths first = *ChoosePaths(blobs), again = *ChoosePaths(blobs);
  EXPECT_EQ(first.island, again.island);
  EXPECT_EQ(first.Islands(), "0,3 1,4 2,5 6");
  EXPECT_EQ(first.across, again.across);
}

TEST(SplitByPath, KeepsOrderPerPeer) {
  int data[6] = {};
  const std::vector<PeerTransfer> group = {
      {TransferKind::kSend, 1, &data[0], 4},    {TransferKind::kReceive, 3, &data[1], 4},
      {TransferKind::kSend, 3, &data[2], 4},    {TransferKind::kReceive, 1, &data[3], 4},
      {TransferKind::kReceive, 2, &data[4], 4}, {TransferKind::kSend, 1, &data[5], 4}};
  const SplitGroup split = SplitByPath(group, {true, true, false, false});
  const auto places = [&data](const std::vector<PeerTransfer>& part) {
    std::vector<int> found;
    for (const PeerTransfer& transfer : part) {
      found.push_back(static_cast<int>(static_cast<int*>(transfer.data) - data));
    }
    return found;
  };
  EXPECT_THAT(places(split.copies), ElementsAre(0, 3, 5));
  EXPECT_THAT(places(split.network), ElementsAre(1, 2, 4));
  EXPECT_THAT(SplitByPath({}, {true}).network, IsEmpty());
}

}  // namespace
}  // namespace ringattn::worker
