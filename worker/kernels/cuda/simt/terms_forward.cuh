// The forward with score terms, in fp32 arithmetic without tensor cores, for tensors of any type:
// exact and slow. attention.cuh is the version without terms; its description also applies here.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_FORWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_FORWARD_CUH_

#include "worker/kernels/cuda/primitives/band.cuh"
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/simt/pair_terms.cuh"
#include "worker/kernels/cuda/simt/row_tile.cuh"

namespace ringattn::worker::cuda::simt {

template <int kDim, int kTile>
struct TermForward {
  using Tile = RowTile<float, kDim, kTile>;
  using Params = TermForwardParams;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kTileRows = kTile;
  static constexpr int kMinBlocks = 2;
  static constexpr int kSharedBytes = 2 * Tile::kTileBytes + Tile::kScoreBytes;

  static __device__ void Run(const Params& params, char* shared) {
    const CommonParams& common = params.common;
    const TermParams& terms = params.terms;
    const ForwardTile tile = params.tiles[blockIdx.x];
    const int pack = params.head_pack;
    const int first_head = blockIdx.y * pack;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = blockIdx.z;
    const int row = threadIdx.x / Tile::kLanes;
    const int lane = threadIdx.x % Tile::kLanes;
    const int q_row = row / pack;
    const bool exists = row < tile.q_rows * pack;
    float* q = reinterpret_cast<float*>(shared);
    float* kv = q + kTile * Tile::kStride;
    float* p = kv + kTile * Tile::kStride;

    LoadRows<Tile>(q, terms.dtype, params.q, tile.q_rows * pack, common.head_dim, [&](int r) {
      return ((batch * common.q_rows + tile.q_row_begin + r / pack) * common.num_heads +
              first_head + r % pack) *
             common.head_dim;
    });
    float4 output[Tile::kVectors];
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) output[j] = make_float4(0, 0, 0, 0);
    float max = NegativeInfinity();
    float sum = 0.0f;

    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const TermRange& place = terms.ranges[index];
      const int64_t first_token = batch * range.block_rows + range.row_begin;
      RowTerms own(terms, common, place, range.limits, q_row, batch, first_head + row % pack,
                   tile.q_row_begin + q_row, exists,
                   place.segment_ids == nullptr ? nullptr : place.segment_ids + first_token);
      int lower, upper;
      RowLimits(range.limits, q_row, &lower, &upper);
      upper = min(upper, range.row_count - 1);
      for (int first = 0; first < range.row_count; first += kTile) {
        if (BlockStopped(common.stop_word, first / kTile)) return;
        PairTerm pairs[Tile::kColumns];
        uint32_t seen = 0;  // bit c: column first + c
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) {
          const int column = first + lane + Tile::kLanes * i;
          pairs[i] = {false, 0.0f, 0.0f};
          if (exists && column >= lower && column <= upper) pairs[i] = own.Of(column);
          seen |= uint32_t{pairs[i].visible} << (lane + Tile::kLanes * i);
        }
        if (!__syncthreads_or(seen != 0)) continue;
        const auto offset = [&](int dim) {
          return [=](int r) {
            return ((first_token + first + r) * common.num_kv_heads + kv_head) * dim;
          };
        };
        const int rows = range.row_count - first;
        LoadRows<Tile>(kv, terms.dtype, range.k, rows, common.head_dim, offset(common.head_dim));
        __syncthreads();
        float scores[Tile::kColumns];
        Tile::Dots(q, kv, row, lane, scores);
        float tile_max = NegativeInfinity();
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) {
          scores[i] = pairs[i].visible ? FinishedScore(scores[i], pairs[i], common).score
                                       : NegativeInfinity();
          tile_max = fmaxf(tile_max, scores[i]);
        }
#pragma unroll
        for (int step = 1; step < Tile::kLanes; step *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, step));
          seen |= __shfl_xor_sync(0xffffffff, seen, step);
        }
        const float updated = fmaxf(max, tile_max);
        const float safe = updated == NegativeInfinity() ? 0.0f : updated;
        const float factor = exp2f((max - safe) * kLog2E);
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
          const int column = lane + Tile::kLanes * i;
          const float e = exp2f((scores[i] - safe) * kLog2E);
          sum += e;
          p[row * Tile::kScoreStride + column] =
              pairs[i].visible ? e * own.Keep(first + column) : 0.0f;
        }
        __syncthreads();
        LoadRows<Tile>(kv, terms.dtype, range.v, rows, common.head_dim_v,
                       offset(common.head_dim_v));
        __syncthreads();
#pragma unroll 2
        for (int key = 0; key < kTile; ++key) {
          if ((seen >> key & 1) == 0) continue;
          Tile::Accumulate(output, p[row * Tile::kScoreStride + key], kv + key * Tile::kStride,
                           lane);
        }
      }
    }

#pragma unroll
    for (int step = 1; step < Tile::kLanes; step *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, step);
    }
    const float lse = sum == 0.0f ? NegativeInfinity() : max + logf(sum);
    const ForwardRow target(params, tile, first_head, batch, row, lse,
                            sum == 0.0f ? 0.0f : 1.0f / sum);
    __syncwarp();  // all lanes of a row have read the previous lse
    if (!target.exists) return;
    switch (terms.dtype) {
      case DType::kBFloat16:
        Store<__nv_bfloat16>(target, output, lane);
        break;
      case DType::kFloat16:
        Store<__half>(target, output, lane);
        break;
      default:
        Store<float>(target, output, lane);
    }
    if (lane == 0) target.StoreLse();
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void Store(const ForwardRow& target,
                                               const float4 (&output)[Tile::kVectors], int lane) {
#pragma unroll
    for (int j = 0; j < Tile::kVectors; ++j) {
      const int column = 4 * (lane + Tile::kLanes * j);
      target.template Store2<T>(column, output[j].x, output[j].y);
      target.template Store2<T>(column + 2, output[j].z, output[j].w);
    }
  }
};

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_FORWARD_CUH_
