#include "client/transfer.h"

#include <algorithm>
#include <random>

#include "common/wire/crc32c.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(ChunkSource, DealsEveryByteOnceInOrder) {
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

// Chunks of random sizes in random order: everything arrives, nothing is taken twice.
TEST(OutputAssembler, TakesAnyOrder) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<uint8_t> source(500), target(500);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
    std::vector<std::pair<size_t, size_t>> ranges;
    for (size_t at = 0, size = 0; at < source.size(); at += size) {
      size = std::min<size_t>(1 + random() % 40, source.size() - at);
      ranges.emplace_back(at, size);
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    OutputAssembler assembler({{v1::TENSOR_ID_OUT, MutableBytesOf(target)}});
    for (const auto& [offset, size] : ranges) {
      EXPECT_FALSE(assembler.CheckComplete().ok());
      const wire::Fragment half[] = {{source.data() + offset, size / 2},
                                     {source.data() + offset + size / 2, size - size / 2}};
      const wire::ChunkHeader header{.tensor = v1::TENSOR_ID_OUT,
                                     .offset = offset,
                                     .crc32c = wire::Crc32c(source.data() + offset, size)};
      ASSERT_TRUE(assembler.Add(header, half, size).ok());
      EXPECT_EQ(assembler.Add(header, half, size).code(), absl::StatusCode::kInternal);
    }
    EXPECT_TRUE(assembler.CheckComplete().ok());
    EXPECT_EQ(source, target);
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

}  // namespace
}  // namespace ringattn
