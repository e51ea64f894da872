// Attention in fp32 arithmetic without tensor cores. It serves fp32 tensors, and 16-bit tensors on
// devices whose shared memory is too small for the tensor-core kernels. It runs on any device of
// compute capability 8.0 or later.
//
// Shapes as in attention_kernel.h, all in global memory of the launching device.
// 256 threads; a tile is kTile q rows by kTile keys (row_tile.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_ATTENTION_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_ATTENTION_CUH_

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/band.cuh"
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/simt/row_tile.cuh"

namespace ringattn::worker::cuda::simt {

template <typename T, int kDim, int kTile>
struct Forward {
  using Tile = RowTile<T, kDim, kTile>;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kTileRows = kTile;
  static constexpr int kSharedBytes = 2 * Tile::kTileBytes + Tile::kScoreBytes;

  static __device__ void Run(const ForwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    if (Stopped(common.stop_word)) return;
    const ForwardTile tile = params.tiles[blockIdx.x];
    const int first_head = blockIdx.y * params.head_pack;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = blockIdx.z;
    const int row = threadIdx.x / Tile::kLanes;
    const int lane = threadIdx.x % Tile::kLanes;
    float* q = reinterpret_cast<float*>(shared);
    float* kv = q + kTile * Tile::kStride;
    float* p = kv + kTile * Tile::kStride;

    Tile::Load(q, tile.q_rows * params.head_pack, common.head_dim,
               [&](int r) { return QRow<T>(params, tile, first_head, batch, r); });
    float4 output[Tile::kVectors];
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) output[j] = make_float4(0, 0, 0, 0);
    float max = NegativeInfinity();
    float sum = 0.0f;

    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      int lower, upper;
      RowLimits(range.limits, params.head_pack == 1 ? row : row / params.head_pack, &lower, &upper);
      upper = min(upper, range.row_count - 1);
      for (int first = 0; first < range.row_count; first += kTile) {
        const int64_t token = batch * range.block_rows + range.row_begin + first;
        __syncthreads();
        Tile::Load(kv, range.row_count - first, common.head_dim, [&](int r) {
          return static_cast<const T*>(range.k) +
                 ((token + r) * common.num_kv_heads + kv_head) * common.head_dim;
        });
        __syncthreads();
        float scores[Tile::kColumns];
        Tile::Dots(q, kv, row, lane, scores);
        float tile_max = NegativeInfinity();
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) {
          const int column = first + lane + Tile::kLanes * i;
          scores[i] = column < lower || column > upper ? NegativeInfinity()
                                                       : ExactScore(scores[i], common).score;
          tile_max = fmaxf(tile_max, scores[i]);
        }
#pragma unroll
        for (int step = 1; step < Tile::kLanes; step *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, step));
        }
        const float updated = fmaxf(max, tile_max);
        const float safe = updated == NegativeInfinity() ? 0.0f : updated;
        const float factor = exp2f(max - safe);
        max = updated;
        sum *= factor;
#pragma unroll
        for (int j = 0; j < Tile::kVectors; ++j) {
          output[j].x *= factor;
          output[j].y *= factor;
          output[j].z *= factor;
          output[j].w *= factor;
        }
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) {
          const float e = exp2f(scores[i] - safe);
          sum += e;
          p[row * Tile::kScoreStride + lane + Tile::kLanes * i] = e;
        }
        __syncthreads();
        Tile::Load(kv, range.row_count - first, common.head_dim_v, [&](int r) {
          return static_cast<const T*>(range.v) +
                 ((token + r) * common.num_kv_heads + kv_head) * common.head_dim_v;
        });
        __syncthreads();
#pragma unroll 4
        for (int key = 0; key < kTile; ++key) {
          Tile::Accumulate(output, p[row * Tile::kScoreStride + key], kv + key * Tile::kStride,
                           lane);
        }
      }
    }

#pragma unroll
    for (int step = 1; step < Tile::kLanes; step *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, step);
    }
    const float lse = sum == 0.0f ? NegativeInfinity() : (max + log2f(sum)) * kLn2;
    ForwardRow target(params, tile, first_head, batch, row, lse, sum == 0.0f ? 0.0f : 1.0f / sum);
    __syncwarp();  // all lanes of a row have read the previous lse
    if (!target.exists) return;
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) {
      const int column = 4 * (lane + Tile::kLanes * j);
      target.template Store2<T>(column, output[j].x, output[j].y);
      target.template Store2<T>(column + 2, output[j].z, output[j].w);
    }
    if (lane == 0) target.StoreLse();
  }
};

template <typename T, int kDim, int kTile>
struct Backward {
  using Tile = RowTile<T, kDim, kTile>;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kTileRows = kTile;
  static constexpr int kSharedBytes = 4 * Tile::kTileBytes + 2 * Tile::kScoreBytes;

  static __device__ void Run(const BackwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    if (Stopped(common.stop_word)) return;
    const BackwardTile tile = params.tiles[blockIdx.x];
    const int heads = params.heads_per_block;
    const int first_head = blockIdx.y * heads;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = blockIdx.z;
    const int row = threadIdx.x / Tile::kLanes;
    const int lane = threadIdx.x % Tile::kLanes;
    float* k = reinterpret_cast<float*>(shared);
    float* v = k + kTile * Tile::kStride;
    float* q = v + kTile * Tile::kStride;
    float* dout = q + kTile * Tile::kStride;
    float* p = dout + kTile * Tile::kStride;
    float* ds = p + kTile * Tile::kScoreStride;

    const int64_t kv_token = batch * tile.block_rows + tile.row_begin;
    const auto kv_offset = [&](int r, int dim) {
      return ((kv_token + r) * common.num_kv_heads + kv_head) * dim;
    };
    Tile::Load(k, tile.rows, common.head_dim, [&](int r) {
      return static_cast<const T*>(tile.k) + kv_offset(r, common.head_dim);
    });
    Tile::Load(v, tile.rows, common.head_dim_v, [&](int r) {
      return static_cast<const T*>(tile.v) + kv_offset(r, common.head_dim_v);
    });
    float4 dk[Tile::kVectors], dv[Tile::kVectors];
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) {
      dk[j] = make_float4(0, 0, 0, 0);
      dv[j] = make_float4(0, 0, 0, 0);
    }

    for (int head = first_head; head < first_head + heads; ++head) {
      for (int index = tile.range_begin; index < tile.range_end; ++index) {
        const QRange& range = params.ranges[index];
        for (int first = 0; first < range.row_count; first += kTile) {
          const int valid_rows = range.row_count - first;
          const int64_t token = range.row_begin + first;
          const auto q_offset = [&](int r, int dim) {
            return ((batch * common.q_rows + token + r) * common.num_heads + head) * dim;
          };
          __syncthreads();
          Tile::Load(q, valid_rows, common.head_dim, [&](int r) {
            return static_cast<const T*>(params.q) + q_offset(r, common.head_dim);
          });
          Tile::Load(dout, valid_rows, common.head_dim_v, [&](int r) {
            return static_cast<const T*>(params.dout) + q_offset(r, common.head_dim_v);
          });
          __syncthreads();
          float scores[Tile::kColumns], gradients[Tile::kColumns];
          Tile::Dots(q, k, row, lane, scores);
          Tile::Dots(dout, v, row, lane, gradients);
          float lse = NegativeInfinity();
          float delta = 0.0f;
          if (row < valid_rows) {
            const int64_t at = (batch * common.num_heads + head) * common.q_rows + token + row;
            lse = params.lse[at];
            delta = params.delta[at];
          }
          int lower, upper;
          RowLimits(range.limits, first + row, &lower, &upper);
          upper = min(upper, tile.rows - 1);
#pragma unroll
          for (int i = 0; i < Tile::kColumns; ++i) {
            const int column = lane + Tile::kLanes * i;
            float probability = 0.0f;
            float gradient = 0.0f;
            if (column >= lower && column <= upper && lse != NegativeInfinity()) {
              const ExactScore s(scores[i], common);
              probability = IsWide(lse) ? expf(WideLogProbability(s.score, lse))
                                        : exp2f(fmaf(-lse, kLog2E, s.score));
              gradient = probability * (gradients[i] - delta) * s.derivative;
            }
            p[row * Tile::kScoreStride + column] = probability;
            ds[row * Tile::kScoreStride + column] = gradient;
          }
          __syncthreads();
          float4 dq[Tile::kVectors];
#pragma unroll
          for (int j = 0; j < Tile::kVectors; ++j) dq[j] = make_float4(0, 0, 0, 0);
#pragma unroll 2
          for (int i = 0; i < kTile; ++i) {
            // `row` is the key in dK and dV, the q row in dQ.
            Tile::Accumulate(dv, p[i * Tile::kScoreStride + row], dout + i * Tile::kStride, lane);
            Tile::Accumulate(dk, ds[i * Tile::kScoreStride + row], q + i * Tile::kStride, lane);
            Tile::Accumulate(dq, ds[row * Tile::kScoreStride + i], k + i * Tile::kStride, lane);
          }
          if (row < valid_rows) {
            Tile::AddTo(params.dq_acc + q_offset(row, common.head_dim), dq, common.softmax_scale,
                        lane, common.head_dim);
          }
        }
      }
    }
    if (row < tile.rows) {
      Tile::AddTo(tile.dk + kv_offset(row, common.head_dim), dk, common.softmax_scale, lane,
                  common.head_dim);
      Tile::AddTo(tile.dv + kv_offset(row, common.head_dim_v), dv, 1.0f, lane, common.head_dim_v);
    }
  }
};

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_ATTENTION_CUH_
