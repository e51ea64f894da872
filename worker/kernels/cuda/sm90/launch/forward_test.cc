#include "worker/kernels/cuda/sm90/launch/forward.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "worker/kernels/cuda/sm90/launch/float8_forward.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr DeviceInfo kHopper{132, 9, 227 << 10};

// One document of n queries and keys. Without addresses a call only measures sizes, so these tests
// need no device.
struct Request {
  explicit Request(int64_t n) {
    problem.dtype = DType::kBFloat16;
    problem.num_heads = 8;
    problem.num_kv_heads = 2;
    problem.head_dim = problem.head_dim_v = 128;
    problem.bands = {Band{}};
    call.problem = &problem;
    call.q_rows = n;
    call.q_pieces = {Piece{0, n, 0, 0, 1}};
    KvBlock block;
    block.rows = n;
    block.pieces = call.q_pieces;
    call.blocks = {block};
    call.initial = call.final = true;
  }
  AttentionProblem problem;
  ForwardCall call;
};

TEST(Sm90ForwardTest, ServesHopperOnly) {
  const Request request(128);
  EXPECT_FALSE(ServesForward(request.problem, {108, 8, 163 << 10}));
  EXPECT_FALSE(ServesForward(request.problem, {148, 10, 227 << 10}));
  EXPECT_FALSE(ServesForward(request.problem, {132, 9, 99 << 10}));
}

TEST(Sm90ForwardTest, ServesE4m3OfHeadDimsUpTo128) {
  const auto serves = [](DType dtype, int64_t head_dim, int64_t head_dim_v) {
    Request request(128);
    request.problem.compute = ComputeDType::kFloat8E4M3;
    request.problem.dtype = dtype;
    request.problem.head_dim = head_dim;
    request.problem.head_dim_v = head_dim_v;
    return ServesForward(request.problem, kHopper);
  };
  EXPECT_TRUE(serves(DType::kBFloat16, 128, 128));
  EXPECT_TRUE(serves(DType::kFloat16, 8, 16));
  EXPECT_FALSE(serves(DType::kFloat32, 64, 64));
  EXPECT_FALSE(serves(DType::kBFloat16, 136, 64));
  EXPECT_FALSE(serves(DType::kBFloat16, 64, 60));
  Request request(128);
  request.problem.compute = ComputeDType::kFloat8E4M3;
  EXPECT_FALSE(ServesForward(request.problem, {108, 8, 163 << 10}));
  request.problem.terms.segment_ids = true;
  EXPECT_FALSE(ServesForward(request.problem, kHopper));
}

// The scratch holds copies of one byte per element in addition to the partials: rows of q and k in
// whole 16 bytes, and keys of v in whole 16.
TEST(Sm90ForwardTest, E4m3CountsItsCopies) {
  Request request(1000);
  request.problem.compute = ComputeDType::kFloat8E4M3;
  request.problem.head_dim = 72;
  request.problem.head_dim_v = 40;
  const auto prepared = PreparedFloat8Forward::Create(request.call, kHopper, {.max_key_splits = 1});
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ((*prepared)->name().family, "sm90");
  EXPECT_EQ((*prepared)->name().kernel_class, "fp8");
  const int64_t copies = 80 * (1000 * 8 + 1000 * 2) + 1008 * 2 * 40;
  EXPECT_GE((*prepared)->scratch_bytes(), copies);
  EXPECT_LE((*prepared)->scratch_bytes(), copies + 4 * 256);
}

TEST(Sm90ForwardTest, ServesWhatTheCopyEngineCanRead) {
  const auto serves = [](DType dtype, int64_t head_dim, int64_t head_dim_v) {
    Request request(128);
    request.problem.dtype = dtype;
    request.problem.head_dim = head_dim;
    request.problem.head_dim_v = head_dim_v;
    return ServesForward(request.problem, kHopper);
  };
  EXPECT_TRUE(serves(DType::kFloat16, 64, 64));
  EXPECT_TRUE(serves(DType::kBFloat16, 40, 256));
  EXPECT_TRUE(serves(DType::kBFloat16, 24, 72));
  EXPECT_FALSE(serves(DType::kFloat32, 64, 64));
  EXPECT_FALSE(serves(DType::kBFloat16, 33, 64));
  EXPECT_FALSE(serves(DType::kBFloat16, 64, 66));
  EXPECT_FALSE(serves(DType::kBFloat16, 32, 32));
  EXPECT_TRUE(serves(DType::kBFloat16, 512, 512));
  EXPECT_TRUE(serves(DType::kFloat16, 576, 512));
  EXPECT_FALSE(serves(DType::kBFloat16, 512, 520));
  EXPECT_FALSE(serves(DType::kBFloat16, 508, 512));
  Request odd(128);
  odd.call.q = reinterpret_cast<const void*>(8);
  EXPECT_FALSE(TakesForward(odd.call));
}

TEST(Sm90ForwardTest, TakesOneStride) {
  Request request(128);
  request.call.q_pieces[0].stride = 4;
  EXPECT_FALSE(TakesForward(request.call));
  request.call.blocks[0].pieces[0].stride = 4;
  EXPECT_TRUE(TakesForward(request.call));
}

TEST(Sm90ForwardTest, TablesBeginWithZeroedCounters) {
  const Request request(1024);
  auto prepared = PreparedForward::Create(request.call, kHopper, {});
  ASSERT_TRUE(prepared.ok());
  EXPECT_TRUE((*prepared)->has_work());
  std::vector<char> tables((*prepared)->table_bytes(), 0x5a);
  (*prepared)->WriteTables(tables.data());
  WorkCounters counters{1, 1};
  std::memcpy(&counters, tables.data(), sizeof(counters));
  EXPECT_EQ(counters.next, 0u);
  EXPECT_EQ(counters.finished, 0u);
}

// If one of two blocks is late, the launch waits for a word among its counters.
TEST(Sm90ForwardTest, LateKeysHaveAWord) {
  Request request(4096);
  EXPECT_FALSE((*PreparedForward::Create(request.call, kHopper, {}))->keys_word_offset());
  KvBlock late = request.call.blocks[0];
  late.late = 1;
  late.pieces[0].position = 4096;
  request.call.blocks.push_back(late);
  EXPECT_TRUE(TakesLateKeys(request.call));
  const auto prepared = *PreparedForward::Create(request.call, kHopper, {});
  EXPECT_EQ(prepared->keys_word_offset(), static_cast<int64_t>(offsetof(WorkCounters, keys)));
  EXPECT_EQ(prepared->scratch_bytes(), 0) << "no wait, so no split keys";
  request.call.late_after = {absl::Microseconds(300)};
  EXPECT_GT((*PreparedForward::Create(request.call, kHopper, {}))->scratch_bytes(), 0);
  request.problem.compute = ComputeDType::kFloat8E4M3;
  EXPECT_FALSE(TakesLateKeys(request.call));
  request.problem.compute = ComputeDType::kAsInputs;
  request.problem.terms.segment_ids = true;
  EXPECT_FALSE(TakesLateKeys(request.call));
}

// One query token of `heads` / 2 heads over 128K keys, in bf16 of head_dim 128.
struct DecodeRequest : Request {
  explicit DecodeRequest(int64_t heads, int64_t rows = 1) : Request(131072) {
    problem.num_heads = heads;
    call.q_rows = rows;
    call.q_pieces = {Piece{0, rows, 0, 0, 1}};
  }
  // Bytes of the partials of `slots` splits in tiles of `tile_rows`, for 2 packs of heads.
  static int64_t ScratchBytes(int64_t slots, int64_t tile_rows) {
    return slots * 2 * tile_rows * (128 * 4 + 4);
  }
};

// Head dims above 256: two blocks share an item, with 64 packed rows each.
TEST(Sm90ForwardTest, WideHeadsDivideTilesBetweenTwoBlocks) {
  Request request(4096);
  request.problem.head_dim = request.problem.head_dim_v = 512;
  EXPECT_FALSE(TakesLateKeys(request.call));
  const auto scratch = [](int64_t heads, int64_t rows) {
    DecodeRequest decode(heads, rows);
    decode.problem.head_dim = decode.problem.head_dim_v = 512;
    return (*PreparedForward::Create(decode.call, kHopper, {}))->scratch_bytes();
  };
  constexpr int64_t kTile = 128 * (512 * 4 + 4);  // bytes of the partials of one item
  const auto items = [&](int64_t heads, int64_t rows) { return scratch(heads, rows) / kTile; };
  // 66 items at once: 2 packs of heads of each part of the keys, up to 64 rows of 4 heads.
  EXPECT_GT(items(8, 16), 60);
  EXPECT_LE(items(8, 16), 66);
  EXPECT_EQ(items(8, 16) % 2, 0);
  // One head per item.
  EXPECT_EQ(items(8, 17) % 8, 0);
}

TEST(Sm90ForwardTest, FewRowsOfSplitKeysTakeSmallTiles) {
  const auto scratch = [](const DecodeRequest& request, const KernelTuning& tuning) {
    return (*PreparedForward::Create(request.call, kHopper, tuning))->scratch_bytes();
  };
  EXPECT_EQ(scratch(DecodeRequest(8), {}), DecodeRequest::ScratchBytes(64, 64));
  EXPECT_EQ(scratch(DecodeRequest(8, 16), {}), DecodeRequest::ScratchBytes(64, 64));
  EXPECT_EQ(scratch(DecodeRequest(8, 17), {}), DecodeRequest::ScratchBytes(64, 128));
  EXPECT_EQ(scratch(DecodeRequest(8), {.max_key_splits = 1}), 0);
  // A device with less shared memory per block than the kernel uses.
  const DecodeRequest request(8);
  const auto prepared = PreparedForward::Create(request.call, {132, 9, 200 << 10}, {});
  EXPECT_EQ((*prepared)->scratch_bytes(), DecodeRequest::ScratchBytes(64, 128));
}

// One ticket for each merged tile and pack of heads, after the counters. None if another kernel
// merges.
TEST(Sm90ForwardTest, TicketsBeginZeroed) {
  const auto tables = [](int64_t rows) {
    const DecodeRequest request(8, rows);
    const auto prepared = PreparedForward::Create(request.call, kHopper, {});
    std::vector<char> bytes((*prepared)->table_bytes(), 0x5a);
    (*prepared)->WriteTables(bytes.data());
    return bytes;
  };
  const std::vector<char> merged = tables(2), combined = tables(3);
  EXPECT_EQ(merged.size(), combined.size() + 256);
  uint32_t tickets[2] = {1, 1};
  std::memcpy(tickets, merged.data() + 256, sizeof(tickets));
  EXPECT_EQ(tickets[0], 0u);
  EXPECT_EQ(tickets[1], 0u);
}

TEST(Sm90ForwardTest, PartsBeginWithTheirLastRange) {
  ForwardPlan plan;
  plan.ranges.resize(3);
  plan.ranges[1].row_begin = 100;
  plan.ranges[1].row_count = 60;
  plan.ranges[1].full_end = 50;
  plan.ranges[1].limits.first_lower = -3;
  plan.ranges[1].limits.first_upper = 70;
  plan.ranges[1].piece = 4;
  plan.ranges[2].row_count = 8;
  plan.tiles.resize(3);
  plan.tiles[0] = {
      .q_row_begin = 5, .q_rows = 2, .range_begin = 0, .range_end = 2, .partial_slot = 3};
  plan.tiles[1] = {.q_row_begin = 7, .q_rows = 1, .range_begin = 2, .range_end = 3};
  plan.combines.resize(3);
  for (int c = 0; c < 3; ++c) {
    plan.combines[c].slot_begin = 2 * c;
    plan.combines[c].slot_end = 2 * c + 2;
  }
  const std::vector<SplitPart> parts = SplitPartsOf(plan, 2);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].tile.q_row_begin, 5);
  EXPECT_EQ(parts[0].tile.range_end, 2);
  EXPECT_EQ(parts[0].last.row_begin, 100);
  EXPECT_EQ(parts[0].last.row_count, 60);
  EXPECT_EQ(parts[0].last.full_end, 50);
  EXPECT_EQ(parts[0].last.first_lower, -3);
  EXPECT_EQ(parts[0].last.first_upper, 70);
  EXPECT_EQ(parts[0].last.piece, 4);
  EXPECT_EQ(parts[0].combine, 1);
  EXPECT_EQ(parts[1].combine, -1);
  EXPECT_EQ(parts[1].tile.q_rows, 1);
  EXPECT_EQ(parts[1].last.row_count, 8);
}

// Only the first and the last call write rows without keys.
TEST(Sm90ForwardTest, KeylessCallsHaveWorkOnlyWhereTheyWrite) {
  Request request(128);
  request.call.blocks.clear();
  EXPECT_TRUE((*PreparedForward::Create(request.call, kHopper, {}))->has_work());
  request.call.initial = request.call.final = false;
  EXPECT_FALSE((*PreparedForward::Create(request.call, kHopper, {}))->has_work());
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
