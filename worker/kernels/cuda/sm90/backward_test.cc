#include "worker/kernels/cuda/sm90/backward.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr DeviceInfo kHopper{132, 9, 227 << 10};

// Without addresses a call is only being measured: nothing here needs a device.
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

TEST(Sm90BackwardTest, TakesOneStride) {
  Request request(128);
  request.call.q_pieces[0].stride = 4;
  EXPECT_FALSE(TakesBackward(request.call));
  request.call.blocks[0].pieces[0].stride = 4;
  EXPECT_TRUE(TakesBackward(request.call));
}

// Tiles and ranges name the piece whose tensor maps they use, empty pieces counted.
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
