#include "worker/kernels/cuda/sm90/launch/span_maps.h"

#include "worker/kernels/cuda/launch/tensor_map.h"
#include "worker/kernels/cuda/sm90/launch/tensor_maps.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

// Without an address the call only measures sizes, and the map stays empty.
absl::Status MapSum(const char* name, float* data, int64_t columns, int64_t heads,
                    const Piece& piece, int64_t row_pitch, int64_t batch, TensorMap& target) {
  if (data == nullptr || batch == 0) return absl::OkStatus();
  const cuda::MappedTensor tensor{.head_dim = columns,
                                  .heads = heads,
                                  .rows = piece.local_begin + piece.length,
                                  .batch = batch,
                                  .row_pitch = row_pitch};
  return EncodeTensorMap(name, data, tensor, {.columns = 32, .rows = kStagedRows}, target.bytes);
}

}  // namespace

bool OneStride(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks) {
  int64_t stride = 0;
  const auto same = [&stride](const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      if (piece.length == 0) continue;
      if (stride == 0) stride = piece.stride;
      if (piece.stride != stride) return false;
    }
    return true;
  };
  if (!same(q_pieces)) return false;
  for (const KvBlock& block : blocks) {
    if (!same(block.pieces)) return false;
  }
  return true;
}

absl::Status MapKeys(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                     int32_t box_rows, std::vector<SpanMaps>& maps) {
  for (const KvBlock& block : blocks) {
    MappedTensor tensor;
    tensor.heads = problem.num_kv_heads;
    tensor.row_pitch = block.rows;
    tensor.batch = problem.batch;
    tensor.box_rows = box_rows;
    for (const Piece& piece : block.pieces) {
      SpanMaps& target = maps.emplace_back();
      if (piece.length == 0) continue;
      tensor.rows = piece.local_begin + piece.length;
      tensor.data = block.k;
      tensor.columns = problem.head_dim;
      if (absl::Status s = EncodeMap(problem.dtype, tensor, target.k); !s.ok()) return s;
      tensor.data = block.v;
      tensor.columns = problem.head_dim_v;
      if (absl::Status s = EncodeMap(problem.dtype, tensor, target.v); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status MapSums(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                     std::vector<SumMaps>& maps) {
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) {
      SumMaps& target = maps.emplace_back();
      if (piece.length == 0) continue;
      absl::Status status = MapSum("dk", block.dk, problem.head_dim, problem.num_kv_heads, piece,
                                   block.rows, problem.batch, target.dk);
      if (!status.ok()) return status;
      status = MapSum("dv", block.dv, problem.head_dim_v, problem.num_kv_heads, piece, block.rows,
                      problem.batch, target.dv);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status MapQueries(const BackwardCall& call, int32_t tile_rows, std::vector<QueryMaps>& maps) {
  const AttentionProblem& problem = *call.problem;
  MappedTensor tensor;
  tensor.heads = problem.num_heads;
  tensor.row_pitch = call.q_rows;
  tensor.batch = problem.batch;
  tensor.box_rows = tile_rows;
  for (const Piece& piece : call.q_pieces) {
    QueryMaps& target = maps.emplace_back();
    if (piece.length == 0) continue;
    tensor.rows = piece.local_begin + piece.length;
    tensor.data = call.q;
    tensor.columns = problem.head_dim;
    if (absl::Status s = EncodeMap(problem.dtype, tensor, target.q); !s.ok()) return s;
    tensor.data = call.dout;
    tensor.columns = problem.head_dim_v;
    if (absl::Status s = EncodeMap(problem.dtype, tensor, target.dout); !s.ok()) return s;
    const absl::Status status = MapSum("dq", call.dq_acc, problem.head_dim, problem.num_heads,
                                       piece, call.q_rows, problem.batch, target.dq);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace ringattn::worker::cuda::sm90
