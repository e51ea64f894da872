#include "worker/comm/peer/peer_blob.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

std::string Uuid(int rank) { return std::string(32, static_cast<char>('a' + rank)); }

PeerBlob Blob(int rank, int world_size) {
  PeerBlob blob;
  blob.host_key = "boot pid:[1]";
  blob.process_id = 100 + rank;
  blob.device_uuid = Uuid(rank);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != rank) blob.reachable_uuids.push_back(Uuid(peer));
  }
  blob.place = absl::StrCat("/proc/", 100 + rank, "/fd/7");
  return blob;
}

PeerBlob VmmBlob(int rank, int world_size) {
  PeerBlob blob = Blob(rank, world_size);
  blob.sharing = PeerSharing::kVmm;
  blob.host_key = "boot";
  blob.process_id = 1;  // as in every container
  blob.place = absl::StrCat("/run/rings/", rank, ".sock");
  blob.token.assign(31, static_cast<char>(rank));
  blob.token.push_back('\n');
  return blob;
}

std::vector<std::string> Texts(const std::vector<PeerBlob>& blobs) {
  std::vector<std::string> texts;
  for (const PeerBlob& blob : blobs) texts.push_back(EncodePeerBlob(blob));
  return texts;
}

TEST(PeerBlob, RoundTrips) {
  const auto blobs = DecodePeerBlobs(Texts({Blob(0, 2), Blob(1, 2)}));
  ASSERT_TRUE(blobs.ok()) << blobs.status();
  const PeerBlob want = Blob(1, 2), &got = (*blobs)[1];
  EXPECT_EQ(got.host_key, want.host_key);
  EXPECT_EQ(got.process_id, want.process_id);
  EXPECT_EQ(got.device_uuid, want.device_uuid);
  EXPECT_EQ(got.reachable_uuids, want.reachable_uuids);
  EXPECT_EQ(got.place, want.place);
  EXPECT_EQ(got.sharing, PeerSharing::kIpc);
  EXPECT_EQ(got.token, "");
}

TEST(PeerBlob, RoundTripsWithDescriptors) {
  const auto blobs = DecodePeerBlobs(Texts({VmmBlob(0, 2), VmmBlob(1, 2)}));
  ASSERT_TRUE(blobs.ok()) << blobs.status();
  const PeerBlob want = VmmBlob(1, 2), &got = (*blobs)[1];
  EXPECT_EQ(got.sharing, PeerSharing::kVmm);
  EXPECT_EQ(got.place, want.place);
  EXPECT_EQ(got.token, want.token);
}

TEST(PeerBlob, NamesRanksThatCannotShare) {
  const auto refused = [](std::vector<PeerBlob> blobs) {
    const absl::Status status = DecodePeerBlobs(Texts(blobs)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  };
  std::vector<PeerBlob> blobs = {Blob(0, 3), Blob(1, 3), Blob(2, 3)};
  blobs[2].host_key = "another";
  EXPECT_EQ(refused(blobs), "ranks 0 and 2 are not on one machine, or not in one PID namespace");
  blobs = {VmmBlob(0, 3), VmmBlob(1, 3), VmmBlob(2, 3)};
  blobs[1].host_key = "boot net:[2]";
  EXPECT_EQ(refused(blobs),
            "ranks 0 and 1 are not on one machine, or not in one network namespace "
            "(--peer_socket_dir)");
  blobs = {VmmBlob(0, 2), Blob(1, 2)};
  EXPECT_EQ(refused(blobs), "ranks 0 and 1 share memory in different ways (--peer_memory)");
  blobs = {Blob(0, 3), Blob(1, 3), Blob(2, 3)};
  blobs[2].device_uuid = Uuid(1);
  EXPECT_EQ(refused(blobs), "ranks 1 and 2 are on one GPU");
  // Both list their own GPU, as with --shared_gpu.
  blobs[1].reachable_uuids.push_back(Uuid(1));
  EXPECT_TRUE(DecodePeerBlobs(Texts(blobs)).ok());
  blobs = {Blob(0, 3), Blob(1, 3), Blob(2, 1)};  // rank 2 reaches rank 0 only
  EXPECT_EQ(refused(blobs), "ranks 1 and 2 have GPUs without access to each other");
}

TEST(PeerBlob, EmptyBlobMeansRankCannotShare) {
  const absl::Status status = DecodePeerBlobs({EncodePeerBlob(Blob(0, 2)), ""}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST(PeerBlob, RejectsMalformedBlobs) {
  const std::string good = EncodePeerBlob(Blob(0, 1));
  ASSERT_TRUE(DecodePeerBlobs({good}).ok());
  std::vector<std::string> bad = {"x", good + "\n", good.substr(0, good.size() - 8),
                                  std::string(1 << 20, 'a')};
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"/proc/100/fd/7", "/etc/passwd"},
                                                        {"/proc/100/fd/7", "/proc/101/fd/7"},
                                                        {"\n100\n", "\n\n"},
                                                        {Uuid(0), "zz"}}) {
    bad.push_back(absl::StrReplaceAll(good, {{from, to}}));
  }
  const std::string vmm = EncodePeerBlob(VmmBlob(0, 1));
  ASSERT_TRUE(DecodePeerBlobs({vmm}).ok());
  bad.push_back(vmm.substr(0, vmm.size() - 2));  // part of the token
  bad.push_back(vmm + "0a");
  bad.push_back(vmm.substr(0, vmm.size() - 1) + "x");
  bad.push_back(absl::StrReplaceAll(vmm, {{"/run/rings", "run"}}));
  bad.push_back(absl::StrReplaceAll(vmm, {{"\nvmm\n", "\nipc\n"}}));
  bad.push_back(absl::StrReplaceAll(good, {{"\nipc\n", "\nvmm\n"}}));
  bad.push_back(absl::StrReplaceAll(good, {{"\nipc\n", "\nother\n"}}));
  for (const std::string& text : bad) {
    EXPECT_EQ(DecodePeerBlobs({text}).status().code(), absl::StatusCode::kInvalidArgument)
        << text.substr(0, 300);
  }
}

TEST(PeerBlob, HostKeyIsStableWithinProcess) {
  EXPECT_FALSE(HostKey().empty());
  EXPECT_EQ(HostKey(), HostKey());
}

TEST(PeerBlob, HostIdsPartRanks) {
  using KeyOf = std::string (*)(const std::string& host_id);
  const KeyOf of_socket = [](const std::string& id) { return SocketKey("@ring", id); };
  for (const KeyOf key : {KeyOf{HostKey}, of_socket}) {
    const std::string any = "a\nb host:";  // an id may hold any character
    EXPECT_EQ(key(any), key(any));
    EXPECT_EQ(key(any).find('\n'), std::string::npos);
    std::vector<PeerBlob> blobs = {Blob(0, 2), Blob(1, 2)};
    blobs[0].host_key = key(any);
    for (const std::string other : {"", "other"}) {
      blobs[1].host_key = key(other);
      EXPECT_EQ(std::string(DecodePeerBlobs(Texts(blobs)).status().message()),
                "ranks 0 and 1 differ in --host_id");
    }
    blobs[1].host_key = key(any);
    EXPECT_TRUE(DecodePeerBlobs(Texts(blobs)).ok());
  }
}

TEST(PeerBlob, DecodesSomeRanks) {
  std::vector<std::string> texts = Texts({Blob(0, 3), Blob(1, 3), Blob(2, 3)});
  texts[1] = "";
  EXPECT_FALSE(DecodePeerBlobs(texts).ok());
  const auto blobs = DecodePeerBlobs(texts, {2, 0});
  ASSERT_TRUE(blobs.ok()) << blobs.status();
  EXPECT_EQ((*blobs)[2].place, Blob(2, 3).place);
  EXPECT_EQ((*blobs)[1].place, "");
  texts[2] = "nonsense";
  EXPECT_THAT(std::string(DecodePeerBlobs(texts, {2, 0}).status().message()),
              HasSubstr("rank 2's blob"));
}

}  // namespace
}  // namespace ringattn::worker
