// Scores of some rows with all keys, in fp32 arithmetic for every dtype of the tensors, with every
// score term. simt/pair_terms.cuh defines the scores, as in the exact forward and backward.
//
// A block of 256 threads multiplies up to kPairs pairs (rows and heads that share a key head) by 64
// keys at a time. It processes 64 elements of head_dim at a time, so that one size of shared memory
// fits every head_dim. Each thread holds kPairs / kRowThreads by kKeys / kKeyThreads products in
// registers. The kernel for many pairs has 4 x 4 products per thread and is bound by arithmetic.
// The kernel for few pairs has 1 x 2 and is bound by reading k.
#include "worker/kernels/cuda/probabilities.h"

#include <algorithm>

#include "worker/kernels/cuda/plan/probability_plan.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/simt/pair_terms.cuh"

namespace ringattn::worker::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKeys = kProbabilityKeys;
constexpr int kChunk = 64;                 // elements of head_dim in shared memory
constexpr int kStride = kChunk + 4;        // floats: rows begin in different banks
constexpr int64_t kMostBlocks = 132 * 16;  // more elements: grid-stride loops

template <typename T>
__device__ __forceinline__ void Widen(uint4 bits, float* target) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float2 a = Unpack<T>(words[i]), b = Unpack<T>(words[i + 1]);
    *reinterpret_cast<float4*>(target + 2 * i) = make_float4(a.x, a.y, b.x, b.y);
  }
}
template <>
__device__ __forceinline__ void Widen<float>(uint4 bits, float* target) {
  *reinterpret_cast<uint4*>(target) = bits;
}

// Loads elements [first, first + kChunk) of kRows rows, with zeros beyond `dim` and for rows whose
// `place` is negative. place(r) is the index of the row's first element in `source`. `vectors`:
// loads 16 bytes at a time; rows are multiples of 16 bytes.
template <typename T, int kRows, typename Place>
__device__ __forceinline__ void LoadChunkOf(float* tile, const void* source, int first, int dim,
                                            bool vectors, const Place& place) {
  const T* const elements = static_cast<const T*>(source);
  if (vectors) {
    constexpr int kUnit = 16 / sizeof(T);
    constexpr int kUnits = kChunk / kUnit;
    for (int index = threadIdx.x; index < kRows * kUnits; index += kThreads) {
      const int row = index / kUnits, column = index % kUnits * kUnit;
      const int64_t at = place(row);
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (at >= 0 && first + column < dim) {
        bits = *reinterpret_cast<const uint4*>(elements + at + first + column);
      }
      Widen<T>(bits, tile + row * kStride + column);
    }
    return;
  }
  for (int index = threadIdx.x; index < kRows * kChunk; index += kThreads) {
    const int row = index / kChunk, column = index % kChunk;
    const int64_t at = place(row);
    const bool exists = at >= 0 && first + column < dim;
    tile[row * kStride + column] = exists ? ToFloat(elements[at + first + column]) : 0.0f;
  }
}

template <int kRows, typename Place>
__device__ __forceinline__ void LoadChunk(float* tile, DType dtype, const void* source, int first,
                                          int dim, bool vectors, const Place& place) {
  switch (dtype) {
    case DType::kBFloat16:
      return LoadChunkOf<__nv_bfloat16, kRows>(tile, source, first, dim, vectors, place);
    case DType::kFloat16:
      return LoadChunkOf<__half, kRows>(tile, source, first, dim, vectors, place);
    default:
      return LoadChunkOf<float, kRows>(tile, source, first, dim, vectors, place);
  }
}

template <int kPairs>
struct Tile {
  static constexpr int kRowThreads = kPairs == kProbabilityPairs ? 16 : kPairs;
  static constexpr int kKeyThreads = kThreads / kRowThreads;
  static constexpr int kOwnRows = kPairs / kRowThreads;
  static constexpr int kOwnKeys = kKeys / kKeyThreads;
  using Products = float[kOwnRows][kOwnKeys];

  // A warp covers 2 x 16 threads for many pairs and 4 x 8 for few, so that each of its reads of k
  // touches two lines of shared memory, or one. Neighbouring lanes have neighbouring keys and store
  // them to adjacent addresses.
  static constexpr int kLaneKeys = kPairs == kProbabilityPairs ? 16 : 8;
  static constexpr int kLaneRows = 32 / kLaneKeys;
  static constexpr int kRowWarps = kRowThreads / kLaneRows;
  static __device__ __forceinline__ int FirstRow() {
    return threadIdx.x / 32 % kRowWarps * kLaneRows + threadIdx.x % 32 / kLaneKeys;
  }
  static __device__ __forceinline__ int FirstKey() {
    return threadIdx.x / 32 / kRowWarps * kLaneKeys + threadIdx.x % kLaneKeys;
  }

  static __device__ __forceinline__ void Multiply(const float* q, const float* k,
                                                  Products& products) {
#pragma unroll 4
    for (int d = 0; d < kChunk; d += 4) {
      float4 x[kOwnRows], y[kOwnKeys];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        x[i] = *reinterpret_cast<const float4*>(q + (FirstRow() + kRowThreads * i) * kStride + d);
      }
#pragma unroll
      for (int j = 0; j < kOwnKeys; ++j) {
        y[j] = *reinterpret_cast<const float4*>(k + (FirstKey() + kKeyThreads * j) * kStride + d);
      }
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOwnKeys; ++j) {
          products[i][j] = fmaf(x[i].x, y[j].x, products[i][j]);
          products[i][j] = fmaf(x[i].y, y[j].y, products[i][j]);
          products[i][j] = fmaf(x[i].z, y[j].z, products[i][j]);
          products[i][j] = fmaf(x[i].w, y[j].w, products[i][j]);
        }
      }
    }
  }
};

// The row of a pair and its head among all query heads.
struct PairPosition {
  int row;  // of params.rows
  int head;

  __device__ __forceinline__ PairPosition(const ProbabilityParams& params, int pair, int kv_head)
      : row(pair / params.common.group_size),
        head(kv_head * params.common.group_size + pair % params.common.group_size) {}
};

// Stores the row's scores or weights for the tile's keys from `first` on, computed from this
// thread's products.
template <int kPairs>
__device__ __forceinline__ void Store(const ProbabilityParams& params, const ProbabilityTile& tile,
                                      int pair, int first,
                                      const float (&products)[Tile<kPairs>::kOwnKeys]) {
  const CommonParams& common = params.common;
  const PairPosition place(params, tile.pair_begin + pair, blockIdx.y);
  const ChosenRowLocation& row = params.rows[place.row];
  TermRange range;
  range.q_position = row.position;
  range.k_position = tile.k_position + tile.k_stride * first;
  range.plane_row = row.local_row;
  range.plane_column = range.k_position;
  range.shift = row.shift;
  range.document = row.document;
  BandLimits limits;  // only its strides are read
  limits.k_stride = tile.k_stride;
  const int32_t* ids = nullptr;
  if (tile.segment_ids != nullptr) {
    ids = tile.segment_ids + row.batch * tile.block_rows + tile.row_begin + first;
  }
  const simt::RowTerms own(params.terms, common, range, limits, /*row=*/0, row.batch, place.head,
                           row.local_row, /*exists=*/true, ids);
  float* const target =
      params.target +
      (static_cast<int64_t>(row.target_row) * common.num_heads + place.head) * params.columns;
  float lse = 0.0f;
  if (params.finished) {
    lse = params.lse[(row.batch * common.num_heads + place.head) * common.q_rows + row.local_row];
  }
#pragma unroll
  for (int j = 0; j < Tile<kPairs>::kOwnKeys; ++j) {
    const int column = Tile<kPairs>::FirstKey() + Tile<kPairs>::kKeyThreads * j;
    if (first + column >= tile.row_count) continue;
    const int64_t key = own.KeyAt(column);
    if (key - row.position < row.lower || key - row.position > row.upper) continue;
    const simt::PairTerm term = own.Of(column);
    if (!term.visible) continue;
    const float score = simt::FinishedScore(products[j], term, common).score;
    if (!params.finished) {
      target[key] = score;
    } else if (lse != NegativeInfinity()) {
      target[key] = simt::ProbabilityOf(score, lse);
    }
  }
}

template <int kPairs>
__global__ void __launch_bounds__(kThreads, 2)
    probability_tiles(const __grid_constant__ ProbabilityParams params) {
  using Shape = Tile<kPairs>;
  __shared__ __align__(16) float q[kPairs * kStride];
  __shared__ __align__(16) float k[kKeys * kStride];
  const CommonParams& common = params.common;
  const ProbabilityTile& tile = params.tiles[blockIdx.x];
  const int64_t batch = params.rows[tile.pair_begin / common.group_size].batch;
  const int64_t first_token = batch * tile.block_rows + tile.row_begin;
  const auto q_place = [&](int pair) -> int64_t {
    if (pair >= tile.pair_count) return -1;
    const PairPosition place(params, tile.pair_begin + pair, blockIdx.y);
    const int64_t row = batch * common.q_rows + params.rows[place.row].local_row;
    return (row * common.num_heads + place.head) * common.head_dim;
  };
  for (int first = 0; first < tile.row_count; first += kKeys) {
    if (simt::BlockStopped(common.stop_word, first / kKeys)) return;
    const auto k_place = [&](int key) -> int64_t {
      if (first + key >= tile.row_count) return -1;
      return ((first_token + first + key) * common.num_kv_heads + blockIdx.y) * common.head_dim;
    };
    typename Shape::Products products = {};
    for (int d = 0; d < common.head_dim; d += kChunk) {
      LoadChunk<kPairs>(q, params.terms.dtype, params.q, d, common.head_dim, common.vector_qk,
                        q_place);
      LoadChunk<kKeys>(k, params.terms.dtype, tile.k, d, common.head_dim, common.vector_qk,
                       k_place);
      __syncthreads();
      Shape::Multiply(q, k, products);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Shape::kOwnRows; ++i) {
      const int pair = Shape::FirstRow() + Shape::kRowThreads * i;
      if (pair < tile.pair_count) Store<kPairs>(params, tile, pair, first, products[i]);
    }
  }
}

__global__ void unseen_rows(const __grid_constant__ ProbabilityParams params) {
  const int64_t count =
      static_cast<int64_t>(params.row_count) * params.common.num_heads * params.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += step) {
    params.target[i] = NegativeInfinity();
  }
}

// A block processes a section of one row and head.
__global__ void row_weights(const __grid_constant__ ProbabilityParams params) {
  const CommonParams& common = params.common;
  const int head = blockIdx.x % common.num_heads;
  const ChosenRowLocation& row = params.rows[blockIdx.x / common.num_heads];
  const float lse =
      params.lse[(row.batch * common.num_heads + head) * common.q_rows + row.local_row];
  float* const target =
      params.target +
      (static_cast<int64_t>(row.target_row) * common.num_heads + head) * params.columns;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t i = blockIdx.y * static_cast<int64_t>(kThreads) + threadIdx.x; i < params.columns;
       i += step) {
    const float score = target[i];
    const bool seen = score != NegativeInfinity() && lse != NegativeInfinity();
    target[i] = seen ? simt::ProbabilityOf(score, lse) : 0.0f;
  }
}

template <int kPairs>
cudaError_t LaunchTilesOf(const ProbabilityParams& params, int64_t tile_count,
                          cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(tile_count),
                  static_cast<unsigned>(params.common.num_kv_heads));
  probability_tiles<kPairs><<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchUnseen(const ProbabilityParams& params, cudaStream_t stream) {
  const int64_t count =
      static_cast<int64_t>(params.row_count) * params.common.num_heads * params.columns;
  const int64_t blocks = std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMostBlocks);
  unseen_rows<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchProbabilityTiles(const ProbabilityParams& params, int32_t tile_pairs,
                                   int64_t tile_count, cudaStream_t stream) {
  return tile_pairs == kProbabilityPairs
             ? LaunchTilesOf<kProbabilityPairs>(params, tile_count, stream)
             : LaunchTilesOf<kFewProbabilityPairs>(params, tile_count, stream);
}

cudaError_t LaunchWeights(const ProbabilityParams& params, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(params.row_count) * params.common.num_heads;
  const int64_t parts = std::clamp<int64_t>(
      std::min(kMostBlocks / rows, (params.columns + kThreads - 1) / kThreads), 1, 1024);
  row_weights<<<dim3(static_cast<unsigned>(rows), static_cast<unsigned>(parts)), kThreads, 0,
                stream>>>(params);
  return cudaGetLastError();
}

std::vector<const void*> ProbabilityKernels() {
  return {reinterpret_cast<const void*>(&probability_tiles<kProbabilityPairs>),
          reinterpret_cast<const void*>(&probability_tiles<kFewProbabilityPairs>),
          reinterpret_cast<const void*>(&unseen_rows), reinterpret_cast<const void*>(&row_weights)};
}

}  // namespace ringattn::worker::cuda
