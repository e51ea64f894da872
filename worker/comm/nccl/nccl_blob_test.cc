#include "worker/comm/nccl/nccl_blob.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

std::string Uuid(int n) { return std::string(31, 'a') + static_cast<char>('0' + n); }

// An id may contain every byte value, including newlines.
std::string Id() {
  std::string id;
  for (int i = 0; i < kNcclUniqueIdBytes; ++i) id.push_back(static_cast<char>(i * 2 + 1));
  id[7] = '\n';
  return id;
}

std::string Blob(int rank) { return EncodeNcclBlob({"node-7", Uuid(rank), rank == 0 ? Id() : ""}); }

TEST(NcclBlob, UniqueIdRoundTrips) {
  for (int world_size : {1, 2, 8}) {
    std::vector<std::string> blobs;
    for (int rank = 0; rank < world_size; ++rank) blobs.push_back(Blob(rank));
    const auto id = UniqueIdOf(blobs);
    ASSERT_TRUE(id.ok()) << id.status();
    EXPECT_EQ(*id, Id());
  }
}

TEST(NcclBlob, NamesTwoRanksOnOneGpu) {
  const auto id = UniqueIdOf({Blob(0), Blob(1), Blob(2), Blob(1)});
  EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(id.status().message()), HasSubstr("ranks 1 and 3 both use GPU"));
  EXPECT_THAT(std::string(id.status().message()), HasSubstr("node-7"));
}

// NCCL does not find out that ranks with different NCCL_HOSTID use one GPU.
TEST(NcclBlob, EmulatedHostsMayShareGpus) {
  const auto blob = [](int rank, const std::string& host_id) {
    return EncodeNcclBlob({"node-7", Uuid(rank % 2), rank == 0 ? Id() : "", host_id});
  };
  EXPECT_TRUE(UniqueIdOf({blob(0, "a"), blob(1, "a"), blob(3, "b"), blob(2, "b")}).ok());
  const auto id = UniqueIdOf({blob(0, "a"), blob(1, "a"), blob(2, "a")});
  EXPECT_THAT(std::string(id.status().message()), HasSubstr("ranks 0 and 2 both use GPU"));
}

TEST(NcclBlob, RejectsMalformedBlobByRank) {
  const std::string bad[] = {
      "",
      "127.0.0.1:1234",  // a TCP worker's blob
      Blob(1).substr(1),
      Blob(0),                                    // rank 0's id at another rank
      Blob(1) + "x",                              // extra bytes
      EncodeNcclBlob({"node-7", "short", ""}),    // no device
      EncodeNcclBlob({"node\x01", Uuid(1), ""}),  // a control character in the name
      EncodeNcclBlob({"node-7", Uuid(1), "", "a\x01"}),
  };
  for (const std::string& blob : bad) {
    const auto id = UniqueIdOf({Blob(0), blob});
    EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument) << blob;
    EXPECT_THAT(std::string(id.status().message()), HasSubstr("rank 1's")) << blob;
  }
  EXPECT_EQ(UniqueIdOf({Blob(1)}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(UniqueIdOf({Blob(0).substr(0, 100)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(UniqueIdOf({}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ringattn::worker
