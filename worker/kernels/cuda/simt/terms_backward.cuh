// Gradients with score terms, in fp32 arithmetic without tensor cores, for tensors of any type:
// exact and slow. One block computes each sum, in a fixed order: the blocks of key tiles compute dk
// and dv, those of query tiles dq, and those of the bias's tiles its gradient. Equal calls give
// equal bits.
//
// kInTurn: q and dout share one tile of memory, and so do k and v. A block loads the pair that it
// multiplies next, so it holds two tiles instead of three or four.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_BACKWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_BACKWARD_CUH_

#include "worker/kernels/cuda/primitives/band.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/simt/pair_terms.cuh"
#include "worker/kernels/cuda/simt/row_tile.cuh"

namespace ringattn::worker::cuda::simt {

// A query row's lse and delta; empty if the row does not exist or saw no key.
struct RowStatistics {
  float lse = NegativeInfinity();
  float delta = 0.0f;

  template <typename Params>
  __device__ __forceinline__ RowStatistics(const Params& params, int64_t batch, int head,
                                           int64_t local_row, bool exists) {
    if (!exists) return;
    const CommonParams& common = params.common;
    const int64_t at = (batch * common.num_heads + head) * common.q_rows + local_row;
    lse = params.lse[at];
    delta = params.delta[at];
  }
  __device__ __forceinline__ bool any() const { return lse != NegativeInfinity(); }
};

// The pairs of a row that a thread has in a tile: which ones are visible, and their terms.
template <typename Tile>
struct TilePairs {
  PairTerm pairs[Tile::kColumns];
  uint32_t seen = 0;  // bit c: column c of the tile

  // `first`: the tile's first column. `lower`, `upper`: the columns of the range that the row sees.
  __device__ __forceinline__ TilePairs(const RowTerms& own, bool any, int first, int lower,
                                       int upper, int lane) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns; ++i) {
      const int column = lane + Tile::kLanes * i;
      pairs[i] = {false, 0.0f, 0.0f};
      if (any && first + column >= lower && first + column <= upper) {
        pairs[i] = own.Of(first + column);
      }
      seen |= uint32_t{pairs[i].visible} << column;
    }
  }

  // Returns the visible columns of all lanes of the row.
  __device__ __forceinline__ uint32_t RowSeen() const {
    uint32_t all = seen;
#pragma unroll
    for (int step = 1; step < Tile::kLanes; step *= 2) {
      all |= __shfl_xor_sync(0xffffffff, all, step);
    }
    return all;
  }
};

// A pair's weights in the gradients.
struct PairGradient {
  float kept;   // of dout in dv
  float ds;     // without the softcap's derivative
  float slope;  // the softcap's derivative

  __device__ __forceinline__ PairGradient(float dot, float dp, const PairTerm& term, float keep,
                                          const RowStatistics& row, const CommonParams& common) {
    const FinishedScore score(dot, term, common);
    const float probability = score.Probability(row.lse);
    kept = probability * keep;
    ds = probability * (dp * keep - row.delta);
    slope = score.slope;
  }
};

// Computes dk and dv of a key tile over all query rows that see it and all heads of the group.
template <int kDim, int kTile, bool kInTurn>
struct TermKeyGradient {
  using Tile = RowTile<float, kDim, kTile>;
  using Params = TermKeyGradientParams;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kTileRows = kTile;
  // Two blocks of the widest rows would spill their sums.
  static constexpr int kMinBlocks = kInTurn ? 1 : 2;
  static constexpr int kTiles = kInTurn ? 2 : 4;
  static constexpr int kSharedBytes = kTiles * Tile::kTileBytes + 2 * Tile::kScoreBytes + kTile * 4;

  static __device__ void Run(const Params& params, char* shared) {
    const CommonParams& common = params.common;
    const TermParams& terms = params.terms;
    const BackwardTile tile = params.tiles[blockIdx.x];
    const int heads = params.heads_per_block;
    const int first_head = blockIdx.y * heads;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = blockIdx.z;
    const int row = threadIdx.x / Tile::kLanes;
    const int lane = threadIdx.x % Tile::kLanes;
    float* k = reinterpret_cast<float*>(shared);
    float* v = kInTurn ? k : k + kTile * Tile::kStride;
    float* q = v + kTile * Tile::kStride;
    float* dout = kInTurn ? q : q + kTile * Tile::kStride;
    float* kept = dout + kTile * Tile::kStride;
    float* ds = kept + kTile * Tile::kScoreStride;
    uint32_t* seen = reinterpret_cast<uint32_t*>(ds + kTile * Tile::kScoreStride);

    const int64_t kv_token = batch * tile.block_rows + tile.row_begin;
    const auto kv_offset = [&](int r, int dim) {
      return ((kv_token + r) * common.num_kv_heads + kv_head) * dim;
    };
    const auto load_k = [&] {
      LoadRows<Tile>(k, terms.dtype, tile.k, tile.rows, common.head_dim,
                     [&](int r) { return kv_offset(r, common.head_dim); });
    };
    const auto load_v = [&] {
      LoadRows<Tile>(v, terms.dtype, tile.v, tile.rows, common.head_dim_v,
                     [&](int r) { return kv_offset(r, common.head_dim_v); });
    };
    if constexpr (!kInTurn) {
      load_k();
      load_v();
    }
    float4 dk[Tile::kVectors], dv[Tile::kVectors];
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) {
      dk[j] = make_float4(0, 0, 0, 0);
      dv[j] = make_float4(0, 0, 0, 0);
    }

    for (int head = first_head; head < first_head + heads; ++head) {
      for (int index = tile.range_begin; index < tile.range_end; ++index) {
        const QRange& range = params.ranges[index];
        const TermRange& place = terms.ranges[index];
        const int32_t* ids = place.segment_ids == nullptr ? nullptr : place.segment_ids + kv_token;
        for (int first = 0; first < range.row_count; first += kTile) {
          if (BlockStopped(common.stop_word, first / kTile)) return;
          const int valid_rows = range.row_count - first;
          const int64_t token = range.row_begin + first;
          const RowStatistics statistics(params, batch, head, token + row, row < valid_rows);
          RowTerms own(terms, common, place, range.limits, first + row, batch, head, token + row,
                       row < valid_rows, ids);
          int lower, upper;
          RowLimits(range.limits, first + row, &lower, &upper);
          const TilePairs<Tile> mine(own, statistics.any(), 0, lower, min(upper, tile.rows - 1),
                                     lane);
          if (!__syncthreads_or(mine.seen != 0)) continue;
          const auto q_offset = [&](int r, int dim) {
            return ((batch * common.q_rows + token + r) * common.num_heads + head) * dim;
          };
          const auto load_q = [&] {
            LoadRows<Tile>(q, terms.dtype, params.q, valid_rows, common.head_dim,
                           [&](int r) { return q_offset(r, common.head_dim); });
          };
          const auto load_dout = [&] {
            LoadRows<Tile>(dout, terms.dtype, params.dout, valid_rows, common.head_dim_v,
                           [&](int r) { return q_offset(r, common.head_dim_v); });
          };
          load_q();
          if constexpr (kInTurn) {
            load_k();
          } else {
            load_dout();
          }
          __syncthreads();
          float scores[Tile::kColumns], gradients[Tile::kColumns];
          Tile::Dots(q, k, row, lane, scores);
          if constexpr (kInTurn) {
            __syncthreads();  // all threads have read q and k
            load_dout();
            load_v();
            __syncthreads();
          }
          Tile::Dots(dout, v, row, lane, gradients);
#pragma unroll
          for (int i = 0; i < Tile::kColumns; ++i) {
            if (!mine.pairs[i].visible) continue;
            const int column = lane + Tile::kLanes * i;
            const PairGradient pair(scores[i], gradients[i], mine.pairs[i], own.Keep(column),
                                    statistics, common);
            kept[row * Tile::kScoreStride + column] = pair.kept;
            ds[row * Tile::kScoreStride + column] = pair.ds * pair.slope;
          }
          const uint32_t row_seen = mine.RowSeen();
          if (lane == 0) seen[row] = row_seen;
          __syncthreads();
          // `row` is the key from here on.
          if constexpr (kInTurn) {
            AddRows(dv, seen, kept, dout, row, lane);
            __syncthreads();  // all threads have read dout
            load_q();
            __syncthreads();
            AddRows(dk, seen, ds, q, row, lane);
          } else {
#pragma unroll 2
            for (int i = 0; i < kTile; ++i) {
              if ((seen[i] >> row & 1) == 0) continue;
              Tile::Accumulate(dv, kept[i * Tile::kScoreStride + row], dout + i * Tile::kStride,
                               lane);
              Tile::Accumulate(dk, ds[i * Tile::kScoreStride + row], q + i * Tile::kStride, lane);
            }
          }
        }
      }
    }
    if (row < tile.rows) {  // no other block adds to these sums
      Tile::AddTo(tile.dk + kv_offset(row, common.head_dim), dk, common.softmax_scale, lane,
                  common.head_dim);
      Tile::AddTo(tile.dv + kv_offset(row, common.head_dim_v), dv, 1.0f, lane, common.head_dim_v);
    }
  }

 private:
  // Adds to `acc` the rows of `source` that see `key`, times their weights.
  static __device__ __forceinline__ void AddRows(float4 (&acc)[Tile::kVectors],
                                                 const uint32_t* seen, const float* weights,
                                                 const float* source, int key, int lane) {
#pragma unroll 2
    for (int i = 0; i < kTile; ++i) {
      if ((seen[i] >> key & 1) == 0) continue;
      Tile::Accumulate(acc, weights[i * Tile::kScoreStride + key], source + i * Tile::kStride,
                       lane);
    }
  }
};

// Computes dq of a query tile over all keys.
template <int kDim, int kTile, bool kInTurn>
struct TermQueryGradient {
  using Tile = RowTile<float, kDim, kTile>;
  using Params = TermQueryGradientParams;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kTileRows = kTile;
  static constexpr int kMinBlocks = 2;
  static constexpr int kTiles = kInTurn ? 2 : 3;
  static constexpr int kSharedBytes = kTiles * Tile::kTileBytes + Tile::kScoreBytes;

  static __device__ void Run(const Params& params, char* shared) {
    const CommonParams& common = params.common;
    const TermParams& terms = params.terms;
    const ForwardTile tile = params.tiles[blockIdx.x];
    const int head = blockIdx.y;
    const int kv_head = head / common.group_size;
    const int64_t batch = blockIdx.z;
    const int row = threadIdx.x / Tile::kLanes;
    const int lane = threadIdx.x % Tile::kLanes;
    const bool exists = row < tile.q_rows;
    float* q = reinterpret_cast<float*>(shared);
    float* dout = kInTurn ? q : q + kTile * Tile::kStride;
    float* kv = dout + kTile * Tile::kStride;
    float* ds = kv + kTile * Tile::kStride;

    const auto q_offset = [&](int r, int dim) {
      return ((batch * common.q_rows + tile.q_row_begin + r) * common.num_heads + head) * dim;
    };
    const auto load_q = [&] {
      LoadRows<Tile>(q, terms.dtype, params.q, tile.q_rows, common.head_dim,
                     [&](int r) { return q_offset(r, common.head_dim); });
    };
    const auto load_dout = [&] {
      LoadRows<Tile>(dout, terms.dtype, params.dout, tile.q_rows, common.head_dim_v,
                     [&](int r) { return q_offset(r, common.head_dim_v); });
    };
    if constexpr (!kInTurn) {
      load_q();
      load_dout();
    }
    const RowStatistics statistics(params, batch, head, tile.q_row_begin + row, exists);
    float4 dq[Tile::kVectors];
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) dq[j] = make_float4(0, 0, 0, 0);

    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const TermRange& place = terms.ranges[index];
      const int64_t first_token = batch * range.block_rows + range.row_begin;
      RowTerms own(terms, common, place, range.limits, row, batch, head, tile.q_row_begin + row,
                   exists,
                   place.segment_ids == nullptr ? nullptr : place.segment_ids + first_token);
      int lower, upper;
      RowLimits(range.limits, row, &lower, &upper);
      upper = min(upper, range.row_count - 1);
      for (int first = 0; first < range.row_count; first += kTile) {
        if (BlockStopped(common.stop_word, first / kTile)) return;
        const TilePairs<Tile> mine(own, statistics.any(), first, lower, upper, lane);
        if (!__syncthreads_or(mine.seen != 0)) continue;
        const int rows = range.row_count - first;
        const auto offset = [&](int dim) {
          return [=](int r) {
            return ((first_token + first + r) * common.num_kv_heads + kv_head) * dim;
          };
        };
        LoadRows<Tile>(kv, terms.dtype, range.v, rows, common.head_dim_v,
                       offset(common.head_dim_v));
        if constexpr (kInTurn) load_dout();
        __syncthreads();
        float scores[Tile::kColumns], gradients[Tile::kColumns];
        Tile::Dots(dout, kv, row, lane, gradients);
        __syncthreads();
        LoadRows<Tile>(kv, terms.dtype, range.k, rows, common.head_dim, offset(common.head_dim));
        if constexpr (kInTurn) load_q();
        __syncthreads();
        Tile::Dots(q, kv, row, lane, scores);
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) {
          if (!mine.pairs[i].visible) continue;
          const int column = lane + Tile::kLanes * i;
          const PairGradient pair(scores[i], gradients[i], mine.pairs[i], own.Keep(first + column),
                                  statistics, common);
          ds[row * Tile::kScoreStride + column] = pair.ds * pair.slope;
        }
        const uint32_t seen = mine.RowSeen();
        __syncwarp();  // the lanes of a row are in one warp
#pragma unroll 2
        for (int key = 0; key < kTile; ++key) {
          if ((seen >> key & 1) == 0) continue;
          Tile::Accumulate(dq, ds[row * Tile::kScoreStride + key], kv + key * Tile::kStride, lane);
        }
      }
    }
    if (exists) {  // no other block adds to these sums
      Tile::AddTo(params.dq_acc + q_offset(row, common.head_dim), dq, common.softmax_scale, lane,
                  common.head_dim);
    }
  }
};

// Computes a bias's gradient at the pairs of a query tile. grid.y and .z are the heads and batch
// rows for which the bias has separate planes; the block sums over the other heads and batch rows.
template <int kDim, int kTile>
struct TermBiasGradient {
  using Tile = RowTile<float, kDim, kTile>;
  using Params = TermQueryGradientParams;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kTileRows = kTile;
  static constexpr int kMinBlocks = 2;
  static constexpr int kSharedBytes = 2 * Tile::kTileBytes;

  static __device__ void Run(const Params& params, char* shared) {
    const CommonParams& common = params.common;
    const TermParams& terms = params.terms;
    const ForwardTile tile = params.tiles[blockIdx.x];
    const int first_head = terms.bias_per_head ? blockIdx.y : 0;
    const int end_head = terms.bias_per_head ? first_head + 1 : common.num_heads;
    const int64_t first_batch = terms.bias_per_batch ? blockIdx.z : 0;
    const int64_t end_batch = terms.bias_per_batch ? first_batch + 1 : common.batch;
    const int row = threadIdx.x / Tile::kLanes;
    const int lane = threadIdx.x % Tile::kLanes;
    const bool exists = row < tile.q_rows;
    float* left = reinterpret_cast<float*>(shared);
    float* right = left + kTile * Tile::kStride;
    const int64_t plane = first_batch * (terms.bias_per_head ? common.num_heads : 1) + first_head;

    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const TermRange& place = terms.ranges[index];
      int lower, upper;
      RowLimits(range.limits, row, &lower, &upper);
      upper = min(upper, range.row_count - 1);
      const int64_t plane_row = PlaneRow(terms, place, range.limits, row);
      const int64_t target =
          (plane * terms.plane_rows + plane_row) * terms.columns + place.plane_column;
      for (int first = 0; first < range.row_count; first += kTile) {
        float sums[Tile::kColumns];
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) sums[i] = 0.0f;
        for (int64_t batch = first_batch; batch < end_batch; ++batch) {
          for (int head = first_head; head < end_head; ++head) {
            if (BlockStopped(common.stop_word, head - first_head)) return;
            AddHead(params, tile, range, place, batch, head, first, lower, upper, row, lane, left,
                    right, sums);
          }
        }
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) {
          const int column = first + lane + Tile::kLanes * i;
          if (!exists || column < lower || column > upper) continue;
          Store(params, target + int64_t{PlaneStride(terms, range.limits)} * column, sums[i]);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void AddHead(const Params& params, const ForwardTile& tile,
                                                 const KvRange& range, const TermRange& place,
                                                 int64_t batch, int head, int first, int lower,
                                                 int upper, int row, int lane, float* left,
                                                 float* right, float (&sums)[Tile::kColumns]) {
    const CommonParams& common = params.common;
    const TermParams& terms = params.terms;
    const bool exists = row < tile.q_rows;
    const int64_t local_row = tile.q_row_begin + row;
    const int64_t first_token = batch * range.block_rows + range.row_begin;
    const RowStatistics statistics(params, batch, head, local_row, exists);
    RowTerms own(terms, common, place, range.limits, row, batch, head, local_row, exists,
                 place.segment_ids == nullptr ? nullptr : place.segment_ids + first_token);
    const TilePairs<Tile> mine(own, statistics.any(), first, lower, upper, lane);
    if (!__syncthreads_or(mine.seen != 0)) return;
    const int rows = range.row_count - first;
    const int kv_head = head / common.group_size;
    const auto products = [&](const void* queries, const void* keys, int dim,
                              float(&result)[Tile::kColumns]) {
      LoadRows<Tile>(left, terms.dtype, queries, tile.q_rows, dim, [&](int r) {
        return ((batch * common.q_rows + tile.q_row_begin + r) * common.num_heads + head) * dim;
      });
      LoadRows<Tile>(right, terms.dtype, keys, rows, dim, [&](int r) {
        return ((first_token + first + r) * common.num_kv_heads + kv_head) * dim;
      });
      __syncthreads();
      Tile::Dots(left, right, row, lane, result);
      __syncthreads();
    };
    float scores[Tile::kColumns], gradients[Tile::kColumns];
    products(params.q, range.k, common.head_dim, scores);
    products(params.dout, range.v, common.head_dim_v, gradients);
#pragma unroll
    for (int i = 0; i < Tile::kColumns; ++i) {
      if (!mine.pairs[i].visible) continue;
      const PairGradient pair(scores[i], gradients[i], mine.pairs[i],
                              own.Keep(first + lane + Tile::kLanes * i), statistics, common);
      sums[i] += terms.bias_before_softcap ? pair.ds * pair.slope : pair.ds;
    }
  }

  static __device__ __forceinline__ void Store(const Params& params, int64_t at, float x) {
    switch (params.terms.bias_dtype) {
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(params.dbias)[at] = FromFloat<__nv_bfloat16>(x);
        break;
      case DType::kFloat16:
        static_cast<__half*>(params.dbias)[at] = FromFloat<__half>(x);
        break;
      default:
        static_cast<float*>(params.dbias)[at] = x;
    }
  }
};

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_BACKWARD_CUH_
