// Packed inputs sent to whole workers: as one tensor, in parts, and with errors.
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/cluster.h"

namespace ringattn::worker {
namespace {

using testing::HasSubstr;

TEST(PackedUpload, ArrivesWholeOrInParts) {
  for (Packing packing : {Packing::kQkv, Packing::kKv}) {
    for (int world_size : {1, 2}) {
      Cluster cluster(world_size);
      cluster.Form(1);
      TestRequest request = TestRequest::Make(61, world_size, packing);
      cluster.RunToTheEnd(request, "1-1", 1);
      for (int rank = 0; rank < world_size; ++rank) {
        cluster.device(rank).SetStaged(absl::Milliseconds(1), 0);
      }
      cluster.RunToTheEnd(request, "1-2", 1);
      request.parts_apart = true;
      cluster.RunToTheEnd(request, "1-3", 1);
      cluster.RunToTheEnd(TestRequest::Make(1, world_size, packing), "1-4",
                          1);  // reserved without a token
      ExpectAllFree(cluster);
    }
  }
}

TEST(PackedUpload, RejectsInvalidChunks) {
  Cluster cluster(1);
  cluster.Form(3);
  const TestRequest request = TestRequest::Make(40, 1, Packing::kKv);
  int next = 0;
  const auto ending = [&](auto send) {
    const std::string id = absl::StrCat("3-", ++next);
    cluster.Reserve(request, id, 3);
    TestExchange exchange(cluster.worker(0).data_address());
    EXPECT_TRUE(exchange.Open(id, 3).ok());
    send(exchange);
    const absl::Status status = exchange.Finish();
    cluster.Release(id, 3);
    return status;
  };
  const int64_t token_bytes = 2 * LayoutOf(request.spec, TensorId::kK).inner_bytes;
  const int64_t kv_bytes = 40 * token_bytes;
  const std::string four(4, 'x'), token(token_bytes, 'x');
  for (uint64_t offset : {uint64_t(kv_bytes - 3), ~uint64_t{0} - 1}) {
    const absl::Status status = ending([&](auto& e) { e.SendChunk(TensorId::kKv, offset, four); });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("kv: 4 bytes at"));
    EXPECT_THAT(status.message(), HasSubstr("exceed the shard's size of 5120"));
  }
  absl::Status status = ending([&](auto& e) {
    e.SendChunk(TensorId::kKv, 0, token);
    e.SendChunk(TensorId::kKv, token_bytes - 4, four);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("v: "));
  EXPECT_THAT(status.message(), HasSubstr("overlap bytes"));
  // As a whole and in parts together, each byte once.
  status = ending([&](auto& e) {
    e.SendChunk(TensorId::kKv, 0, token);
    e.SendChunk(TensorId::kK, token_bytes / 2 - 4, four);
  });
  EXPECT_THAT(status.message(), HasSubstr("k: "));
  EXPECT_THAT(status.message(), HasSubstr("overlap bytes"));
  status = ending([&](auto& e) { e.SendChunk(TensorId::kQkv, 0, four); });
  EXPECT_THAT(status.message(), HasSubstr("not an input"));
  status = ending([&](auto& e) { e.SendChunk(TensorId::kKv, 0, token, 123u); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("crc32c"));
  ExpectAllFree(cluster);
}

}  // namespace
}  // namespace ringattn::worker
