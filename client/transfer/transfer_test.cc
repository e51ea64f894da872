#include "client/transfer/transfer.h"

#include <algorithm>
#include <random>

#include "common/wire/crc32c.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

TEST(ChunkSource, ReturnsEveryByteOnceInOrder) {
  std::vector<uint8_t> q(10), empty, v(3);
  ChunkSource source({{v1::TENSOR_ID_Q, BytesOf(q)},
                      {v1::TENSOR_ID_K, BytesOf(empty)},
                      {v1::TENSOR_ID_V, BytesOf(v)}},
                     4);
  EXPECT_EQ(source.total_bytes(), 13u);
  std::vector<std::tuple<int, uint64_t, uint64_t>> chunks;
  while (const auto chunk = source.Next()) {
    chunks.emplace_back(chunk->tensor, chunk->offset, chunk->bytes.size());
  }
  EXPECT_EQ(chunks, (decltype(chunks){{1, 0, 4}, {1, 4, 4}, {1, 8, 2}, {3, 0, 3}}));
  EXPECT_EQ(source.dealt_bytes(), 13u);
}

// Two of every five bytes.
TEST(ChunkSource, GathersBytesThatAreNotContiguous) {
  std::vector<uint8_t> memory(25);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i);
  ChunkSource source({{v1::TENSOR_ID_Q, ConstRuns(memory.data() + 1, 5, 2, 5)}}, 3);
  EXPECT_EQ(source.total_bytes(), 10u);
  std::vector<uint8_t> dealt;
  while (const auto chunk = source.Next()) {
    EXPECT_EQ(chunk->offset, dealt.size());
    EXPECT_EQ(chunk->gathered.get(), chunk->bytes.data());
    dealt.insert(dealt.end(), chunk->bytes.begin(), chunk->bytes.end());
  }
  EXPECT_EQ(dealt, (std::vector<uint8_t>{1, 2, 6, 7, 11, 12, 16, 17, 21, 22}));
}

// Chunks of random sizes in random order: all bytes arrive and none twice.
TEST(OutputAssembler, AcceptsAnyOrder) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<uint8_t> source(500), target(round % 2 == 0 ? 500 : 700);
    // In every second round 5 of every 7 bytes; the others stay unchanged.
    const MutableRuns view = round % 2 == 0 ? MutableRuns(MutableBytesOf(target))
                                            : MutableRuns(target.data(), 100, 5, 7);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
    std::vector<std::pair<size_t, size_t>> ranges;
    for (size_t at = 0, size = 0; at < source.size(); at += size) {
      size = std::min<size_t>(1 + random() % 40, source.size() - at);
      ranges.emplace_back(at, size);
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    OutputAssembler assembler({{v1::TENSOR_ID_OUT, view}});
    for (const auto& [offset, size] : ranges) {
      EXPECT_FALSE(assembler.CheckComplete().ok());
      const wire::Fragment half[] = {{source.data() + offset, size / 2},
                                     {source.data() + offset + size / 2, size - size / 2}};
      const wire::ChunkHeader header{.tensor = v1::TENSOR_ID_OUT,
                                     .offset = offset,
                                     .crc32c = wire::Crc32c(source.data() + offset, size)};
      wire::ChunkHeader damaged = header;
      *damaged.crc32c ^= 1;
      EXPECT_EQ(OutputAssembler({{v1::TENSOR_ID_OUT, view}}).Add(damaged, half, size).code(),
                absl::StatusCode::kDataLoss);
      ASSERT_TRUE(assembler.Add(header, half, size).ok());
      EXPECT_EQ(assembler.Add(header, half, size).code(), absl::StatusCode::kInternal);
    }
    EXPECT_TRUE(assembler.CheckComplete().ok());
    std::vector<uint8_t> arrived(500);
    CopyOut(ConstRuns(view.data(), 100, 5, round % 2 == 0 ? 5 : 7), 0, 500, arrived.data());
    EXPECT_EQ(source, arrived);
    for (size_t i = 0; i < target.size() && round % 2 == 1; ++i) {
      if (i % 7 < 5) continue;
      EXPECT_EQ(target[i], 0) << "a byte between the runs";
    }
  }
}

TEST(OutputAssembler, AnnouncementsMustMatch) {
  std::vector<uint8_t> out(8), lse(4);
  const OutputAssembler assembler(
      {{v1::TENSOR_ID_OUT, MutableBytesOf(out)}, {v1::TENSOR_ID_LSE, MutableBytesOf(lse)}});
  google::protobuf::RepeatedPtrField<v1::TensorDescriptor> announced;
  const auto announce = [&](v1::TensorId tensor, uint64_t bytes) {
    announced.Add()->set_tensor(tensor);
    announced.rbegin()->set_bytes(bytes);
  };
  announce(v1::TENSOR_ID_LSE, 4);
  EXPECT_FALSE(assembler.CheckAnnounced(announced).ok());
  announce(v1::TENSOR_ID_OUT, 8);
  EXPECT_TRUE(assembler.CheckAnnounced(announced).ok());
  announced.rbegin()->set_bytes(9);
  EXPECT_FALSE(assembler.CheckAnnounced(announced).ok());
  announced.rbegin()->set_bytes(8);
  announce(v1::TENSOR_ID_DQ, 8);
  EXPECT_FALSE(assembler.CheckAnnounced(announced).ok());
}

TEST(ChunkBytesUpTest, UsesTheServersRecommendationByDefault) {
  v1::Accepted accepted;
  EXPECT_EQ(ChunkBytesUp(0, accepted), 1u << 20) << "no advice: what is usual";
  EXPECT_EQ(ChunkBytesUp(5000, accepted), 5000u);
  accepted.set_recommended_chunk_bytes(2 << 20);
  accepted.set_max_chunk_bytes_up(16 << 20);
  EXPECT_EQ(ChunkBytesUp(0, accepted), 2u << 20);
  EXPECT_EQ(ChunkBytesUp(4 << 20, accepted), 4u << 20);
  EXPECT_EQ(ChunkBytesUp(32 << 20, accepted), 16u << 20) << "more than the server takes";
  accepted.set_max_chunk_bytes_up(1 << 10);
  EXPECT_EQ(ChunkBytesUp(0, accepted), 1u << 10) << "advice above what it takes";
}

}  // namespace
}  // namespace ringattn::client
