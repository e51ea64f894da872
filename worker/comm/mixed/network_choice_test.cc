#include "worker/comm/mixed/network_choice.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

// Ranks that offer both engines, each alone on its host.
std::vector<MixedBlob> Ring(int ranks) {
  std::vector<MixedBlob> blobs(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    blobs[rank].nccl = "nccl";
    blobs[rank].wire = "wire";
    blobs[rank].host = std::string(1, static_cast<char>('a' + rank));
    blobs[rank].rdma = true;
  }
  return blobs;
}

absl::StatusOr<NetworkChoice> Choose(const std::vector<MixedBlob>& blobs) {
  std::vector<int> island;
  for (size_t rank = 0; rank < blobs.size(); ++rank) island.push_back(static_cast<int>(rank));
  return ChooseNetwork(blobs, island, "ranks 0 and 1 are not on one machine");
}

void ExpectChoice(const std::vector<MixedBlob>& blobs, NetworkEngine engine,
                  const std::string& reason) {
  const absl::StatusOr<NetworkChoice> choice = Choose(blobs);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(NetworkName(choice->engine), NetworkName(engine));
  EXPECT_THAT(choice->reason, HasSubstr(reason));
}

TEST(NetworkChoice, RdmaOfAllRanksMeansNccl) {
  std::vector<MixedBlob> blobs = Ring(3);
  ExpectChoice(blobs, NetworkEngine::kNccl, "all ranks have RDMA");
  blobs[2].rdma = false;
  ExpectChoice(blobs, NetworkEngine::kWire, "rank 2 has no RDMA");
}

TEST(NetworkChoice, CertificatesMeanWireBetweenHosts) {
  std::vector<MixedBlob> blobs = Ring(3);
  blobs[1].tls = true;
  ExpectChoice(blobs, NetworkEngine::kWire, "rank 1 has cluster certificates");
  blobs[1].insecure_ring = true;
  ExpectChoice(blobs, NetworkEngine::kNccl, "all ranks have RDMA");
}

TEST(NetworkChoice, NcclThatLeavesAHostIsRefusedWithCertificates) {
  std::vector<MixedBlob> blobs = Ring(3);
  blobs[2].wire = "";
  blobs[1].tls = true;
  const absl::Status refused = Choose(blobs).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("rank 1 has cluster certificates, and rank 2 has only NCCL, which does not "
                        "encrypt what it sends between hosts; start all workers with "
                        "--ring_transport=auto, or with --insecure_ring"));
  blobs[2].tls = true;
  blobs[1].tls = false;
  EXPECT_THAT(std::string(Choose(blobs).status().message()),
              HasSubstr("rank 2 has cluster certificates and only NCCL, which does not encrypt"));
  blobs[2].insecure_ring = true;
  ExpectChoice(blobs, NetworkEngine::kNccl, "rank 2 has no sockets");
  // Within a host nothing is sent over a network.
  blobs[2].insecure_ring = false;
  for (MixedBlob& blob : blobs) blob.host = "a";
  ExpectChoice(blobs, NetworkEngine::kNccl, "rank 2 has no sockets");
}

TEST(NetworkChoice, OneHostMeansNccl) {
  std::vector<MixedBlob> blobs = Ring(2);
  blobs[1].rdma = false;
  blobs[1].host = "a";
  blobs[0].tls = blobs[1].tls = true;
  ExpectChoice(blobs, NetworkEngine::kNccl, "all ranks are on one host");
  // Ranks without a name may be on different hosts.
  blobs[0].host = blobs[1].host = "";
  ExpectChoice(blobs, NetworkEngine::kWire, "rank 0 has cluster certificates");
}

TEST(NetworkChoice, LoopbackSocketsServeOnlyIfNothingElseDoes) {
  std::vector<MixedBlob> blobs = Ring(2);
  blobs[0].rdma = false;
  blobs[1].loopback = true;
  ExpectChoice(blobs, NetworkEngine::kNccl,
               "rank 1 has a loopback address as --ring_address, so its sockets cannot be reached");
  blobs[0].nccl = "";
  ExpectChoice(blobs, NetworkEngine::kWire, "rank 0 has no NCCL");
}

TEST(NetworkChoice, NamesRanksWithoutACommonEngine) {
  std::vector<MixedBlob> blobs = Ring(3);
  blobs[0].wire = "";
  blobs[2].nccl = "";
  const absl::Status apart = Choose(blobs).status();
  EXPECT_EQ(apart.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(apart.message()),
              HasSubstr("ranks 0 and 1 are not on one machine, but rank 2 has no NCCL and rank 0 "
                        "no sockets"));
  blobs[1].nccl = blobs[1].wire = "";
  EXPECT_THAT(std::string(Choose(blobs).status().message()),
              HasSubstr("and rank 1 has no other transport"));
}

}  // namespace
}  // namespace ringattn::worker
