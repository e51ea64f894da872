#include "worker/kernels/cuda/sm90/launch/backward.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr DeviceInfo kHopper{132, 9, 227 << 10};

// Without addresses a call only measures sizes, so these tests need no device.
struct Request {
  explicit Request(int64_t n) {
    problem.dtype = DType::kBFloat16;
    problem.num_heads = 8;
    problem.num_kv_heads = 2;
    problem.head_dim = problem.head_dim_v = 128;
    problem.bands = {Band{}, Band{}};
    call.problem = &problem;
    call.q_rows = n;
    call.q_pieces = {Piece{0, n, 0, 0, 1}};
    KvBlock block;
    block.rows = n;
    block.pieces = call.q_pieces;
    call.blocks = {block};
  }
  std::vector<char> Tables() const {
    auto prepared = PreparedBackward::Create(call, kHopper);
    EXPECT_TRUE(prepared.ok());
    std::vector<char> tables((*prepared)->table_bytes(), 0x5a);
    (*prepared)->WriteTables(tables.data());
    return tables;
  }
  AttentionProblem problem;
  BackwardCall call;
};

TEST(Sm90BackwardTest, ServesHopperOnly) {
  const Request request(128);
  EXPECT_TRUE(ServesBackward(request.problem, kHopper));
  EXPECT_FALSE(ServesBackward(request.problem, {108, 8, 163 << 10}));
  EXPECT_FALSE(ServesBackward(request.problem, {148, 10, 227 << 10}));
  EXPECT_FALSE(ServesBackward(request.problem, {132, 9, 99 << 10}));
}

TEST(Sm90BackwardTest, ServesHeadDimensionsThatItHasKernelsFor) {
  const auto serves = [](DType dtype, int64_t head_dim, int64_t head_dim_v) {
    Request request(128);
    request.problem.dtype = dtype;
    request.problem.head_dim = head_dim;
    request.problem.head_dim_v = head_dim_v;
    return ServesBackward(request.problem, kHopper);
  };
  EXPECT_TRUE(serves(DType::kFloat16, 64, 64));
  EXPECT_TRUE(serves(DType::kBFloat16, 40, 128));
  EXPECT_TRUE(serves(DType::kBFloat16, 24, 72));
  EXPECT_FALSE(serves(DType::kFloat32, 64, 64));
  EXPECT_FALSE(serves(DType::kBFloat16, 33, 64));
  EXPECT_FALSE(serves(DType::kBFloat16, 64, 66));
  EXPECT_FALSE(serves(DType::kBFloat16, 32, 32));
  EXPECT_TRUE(serves(DType::kBFloat16, 192, 128));
  EXPECT_TRUE(serves(DType::kFloat16, 136, 256));
  EXPECT_TRUE(serves(DType::kFloat16, 264, 64));
  EXPECT_TRUE(serves(DType::kBFloat16, 40, 512));
  EXPECT_FALSE(serves(DType::kBFloat16, 508, 512));
  EXPECT_FALSE(serves(DType::kBFloat16, 520, 512));
  EXPECT_FALSE(serves(DType::kFloat32, 512, 512));
}

// Above head_dim 256 two blocks have the same 64 keys and divide the columns.
TEST(Sm90BackwardTest, WideHeadsHaveTilesOf64Keys) {
  Request request(1000);
  request.problem.num_kv_heads = 8;
  request.problem.head_dim = 512;
  request.problem.head_dim_v = 320;
  const std::vector<char> tables = request.Tables();
  for (int64_t i = 0; i < 16; ++i) {
    BackwardTile tile;
    std::memcpy(&tile, tables.data() + i * sizeof(tile), sizeof(tile));
    EXPECT_EQ(tile.row_begin, i * 64);
    EXPECT_EQ(tile.rows, std::min<int64_t>(64, 1000 - i * 64));
  }
  KvBlock& block = request.call.blocks[0];
  block.dk_out = reinterpret_cast<void*>(uintptr_t{4096});
  block.dv_out = reinterpret_cast<void*>(uintptr_t{8192});
  const auto prepare = [&] { return *PreparedBackward::Create(request.call, kHopper); };
  EXPECT_TRUE(prepare()->stores_key_gradients());
  request.problem.softcap = 20;
  EXPECT_TRUE(ServesBackward(request.problem, kHopper));
  EXPECT_FALSE(prepare()->stores_key_gradients());
  // Other families serve fixed orders of sums and score terms.
  request.problem.deterministic = true;
  EXPECT_FALSE(ServesBackward(request.problem, kHopper));
  request.problem.deterministic = false;
  request.problem.softcap = 0;
  request.problem.terms.alibi_slopes.assign(request.problem.num_heads, 0.5f);
  EXPECT_FALSE(ServesBackward(request.problem, kHopper));
}

// The kernel stores key gradients if no other block adds to them and every key has a tile.
TEST(Sm90BackwardTest, StoresKeyGradientsWhereItHasAllOfThem) {
  Request request(1000);
  request.problem.num_kv_heads = 8;
  KvBlock& block = request.call.blocks[0];
  const auto stores = [&] {
    return (*PreparedBackward::Create(request.call, kHopper))->stores_key_gradients();
  };
  EXPECT_FALSE(stores());
  block.dk_out = reinterpret_cast<void*>(uintptr_t{4096});
  EXPECT_FALSE(stores());
  block.dv_out = reinterpret_cast<void*>(uintptr_t{8192});
  EXPECT_TRUE(stores());
  request.problem.bands[0] = Band{-100, 0};
  EXPECT_TRUE(stores());
  request.problem.bands[0] = Band{100, 200};  // 100 keys are hidden: less than a tile
  EXPECT_TRUE(stores());
  request.problem.bands[0] = Band{200, 300};
  EXPECT_FALSE(stores());
  request.problem.bands[0] = Band{};
  block.pieces[0].length = 900;
  EXPECT_FALSE(stores());
  block.pieces[0].length = 1000;
  request.problem.num_kv_heads = 2;  // heads of a group are distributed over blocks
  EXPECT_FALSE(stores());
  request.problem.num_kv_heads = 8;
  request.problem.deterministic = true;
  EXPECT_FALSE(stores());
  request.problem.deterministic = false;
  request.problem.softcap = 20.0f;
  EXPECT_FALSE(stores());
  request.problem.softcap = 0.0f;
  request.problem.terms.alibi_slopes.assign(request.problem.num_heads, 0.5f);
  EXPECT_TRUE(stores());
  request.problem.terms.dropout.threshold = 100;
  EXPECT_FALSE(stores());
}

// If this leaves no multiprocessor idle for long, blocks process whole groups of heads. The other
// tables are unchanged, so a call that only measures sizes needs no addresses.
TEST(Sm90BackwardTest, StoresKeyGradientsOfGroups) {
  const auto prepare = [](int64_t tokens, bool causal, bool hints) {
    Request request(tokens);
    request.problem.num_heads = 32;
    request.problem.num_kv_heads = 8;
    if (causal) request.problem.bands[0] = Band{-tokens, 0};
    if (hints) {
      request.call.blocks[0].dk_out = reinterpret_cast<void*>(uintptr_t{4096});
      request.call.blocks[0].dv_out = reinterpret_cast<void*>(uintptr_t{8192});
    }
    return *PreparedBackward::Create(request.call, kHopper);
  };
  for (const bool causal : {true, false}) {
    EXPECT_FALSE(prepare(1024, causal, true)->stores_key_gradients());
    EXPECT_EQ(prepare(2048, causal, true)->stores_key_gradients(), !causal);
    EXPECT_TRUE(prepare(4096, causal, true)->stores_key_gradients());
    EXPECT_FALSE(prepare(4096, causal, false)->stores_key_gradients());
    EXPECT_TRUE(prepare(8192, causal, true)->stores_key_gradients());
    EXPECT_EQ(prepare(4096, causal, true)->table_bytes(),
              prepare(4096, causal, false)->table_bytes());
    EXPECT_EQ(prepare(4096, causal, true)->scratch_bytes(),
              prepare(4096, causal, false)->scratch_bytes());
  }
}

// Deterministic backwards have separate kernels, which use counters in scratch memory.
TEST(Sm90BackwardTest, ServesDeterministicBackwards) {
  Request request(1000);
  request.call.blocks[0].pieces = {Piece{0, 1000, 1, 0, 1}};
  request.call.q_pieces = request.call.blocks[0].pieces;
  request.problem.bands[1] = Band{-100, 0};
  const auto prepare = [&] { return *PreparedBackward::Create(request.call, kHopper); };
  EXPECT_EQ(prepare()->scratch_bytes(), 0);
  const int64_t table_bytes = prepare()->table_bytes();
  for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
    for (const float softcap : {0.0f, 20.0f}) {
      request.problem.head_dim = request.problem.head_dim_v = head_dim;
      request.problem.softcap = softcap;
      request.problem.deterministic = true;
      EXPECT_TRUE(ServesBackward(request.problem, kHopper));
      EXPECT_GT(prepare()->scratch_bytes(), 0);  // counters
      EXPECT_GT(prepare()->table_bytes(), table_bytes);
      EXPECT_EQ(prepare()->name(), (KernelName{"sm90", "plain", ""}));
    }
  }
  request.problem.head_dim = request.problem.head_dim_v = 64;
  request.problem.softcap = 0;
  request.problem.terms.shifts = {0, 0};
  request.problem.terms.segment_ids = true;
  EXPECT_TRUE(ServesBackward(request.problem, kHopper));
  EXPECT_EQ(prepare()->name(), (KernelName{"sm90", "terms", ""}));
  const int64_t scratch = prepare()->scratch_bytes();
  request.problem.terms.mask = MaskForm{.per_head = true};  // separate turns for each head
  EXPECT_GT(prepare()->scratch_bytes(), scratch);
  request.problem.deterministic = false;
  EXPECT_TRUE(ServesBackward(request.problem, kHopper));
}

// A window's tiles begin at any row; those of an ordered backward begin at multiples of a tile's
// rows in the piece.
TEST(Sm90BackwardTest, OrderedRangesBeginAtTiles) {
  Request request(1000);
  request.problem.bands[0] = Band{-100, 37};
  request.problem.deterministic = true;
  request.call.q_pieces = {Piece{0, 13, 1, 0, 1}, Piece{13, 987, 0, 0, 1}};
  const std::vector<char> tables = request.Tables();
  for (int i = 0; i < 8; ++i) {  // 8 tiles with one or more ranges each
    QRange range;
    const size_t tiles = (8 * sizeof(BackwardTile) + 255) / 256 * 256;
    std::memcpy(&range, tables.data() + tiles + i * sizeof(range), sizeof(range));
    EXPECT_EQ(range.piece, 1);
    EXPECT_EQ((range.row_begin - 13) % 64, 0);
  }
}

TEST(Sm90BackwardTest, TakesAlignedAddresses) {
  float* const odd = reinterpret_cast<float*>(8);
  Request request(128);
  EXPECT_TRUE(TakesBackward(request.call));
  request.call.dq_acc = odd;
  EXPECT_FALSE(TakesBackward(request.call));
  request.call.dq_acc = nullptr;
  request.call.blocks[0].dv = odd;
  EXPECT_FALSE(TakesBackward(request.call));
}

// The gradient needs one plane per head, the call's type and whole vectors.
TEST(Sm90BackwardTest, StoresGradientsOfBiases) {
  Request request(1000);
  AttentionProblem& problem = request.problem;
  const auto stores = [&request](uintptr_t address = 0) {
    return StoresBiasGradient(request.call, reinterpret_cast<const void*>(address));
  };
  EXPECT_FALSE(stores());
  problem.terms.columns = 1000;
  problem.terms.bias = BiasForm{.per_head = true};
  EXPECT_TRUE(stores());
  EXPECT_TRUE(stores(32));
  EXPECT_FALSE(stores(8));
  problem.terms.bias->float32 = true;
  EXPECT_FALSE(stores());
  problem.terms.bias = BiasForm{.per_batch = true};
  EXPECT_FALSE(stores());
  problem.terms.bias->per_head = true;
  problem.batch = 2;
  EXPECT_TRUE(stores());
  problem.terms.bias->per_batch = false;
  EXPECT_FALSE(stores());
  problem.terms.bias->per_batch = true;
  problem.terms.columns = 1001;
  EXPECT_FALSE(stores());
  problem.terms.columns = 1016;
  EXPECT_TRUE(stores());
  request.call.blocks[0].pieces[0].position = 8;
  EXPECT_TRUE(stores());
  request.call.blocks[0].pieces[0].position = 4;
  EXPECT_FALSE(stores());
  request.call.blocks[0].pieces[0] = {0, 1000, 0, 0, 2};
  request.call.q_pieces[0].stride = 2;
  EXPECT_FALSE(stores());
}

TEST(Sm90BackwardTest, TakesOneStride) {
  Request request(128);
  request.call.q_pieces[0].stride = 4;
  EXPECT_FALSE(TakesBackward(request.call));
  request.call.blocks[0].pieces[0].stride = 4;
  EXPECT_TRUE(TakesBackward(request.call));
}

// Tiles and ranges store the index of the piece whose tensor maps they use, counting empty pieces.
TEST(Sm90BackwardTest, TablesNamePieces) {
  Request request(256);
  request.call.q_pieces = {Piece{0, 0, 0, 0, 1}, Piece{0, 256, 1, 0, 1}};
  request.call.blocks[0].pieces = {Piece{0, 128, 0, 0, 1}, Piece{128, 128, 1, 0, 1}};
  const std::vector<char> tables = request.Tables();
  BackwardTile tile;
  std::memcpy(&tile, tables.data(), sizeof(tile));
  EXPECT_EQ(tile.piece, 1);
  EXPECT_EQ(tile.row_begin, 128);
  QRange range;
  std::memcpy(&range, tables.data() + 256, sizeof(range));
  EXPECT_EQ(range.piece, 1);
  EXPECT_EQ(range.row_count, 256);
}

TEST(Sm90BackwardTest, CallsWithoutKeysLaunchNothing) {
  Request request(128);
  request.call.blocks.clear();
  auto prepared = PreparedBackward::Create(request.call, kHopper);
  ASSERT_TRUE(prepared.ok());
  EXPECT_TRUE((*prepared)->Launch({}).ok());
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
