// The computation on a backward's transposed scores between the products when they have terms: S
// becomes P, and dP becomes dS. A thread has two keys (eight apart) by kRows q rows, as in
// backward_scores.cuh. The order is that of docs/semantics.md: scale, bias, ALiBi, masks. There is
// no softcap: its derivative and dropout's bits would need too many registers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_SCORES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_SCORES_CUH_

#include "worker/kernels/cuda/plan/keep_bits.h"
#include "worker/kernels/cuda/sm90/backward/backward_scores.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The thread's two keys in the thread block, eight apart, and its rows in a tile, row + 8 n and the
// next. Values are computed again at each use, because registers are short.
struct TermKeys {
  const BackwardItem& item;

  __device__ __forceinline__ int Key(int half) const {
    return (static_cast<int>(threadIdx.x) - 128) / 32 * 16 + (threadIdx.x & 31) / 4 + half * 8;
  }
  __device__ __forceinline__ int Row() const { return (threadIdx.x & 3) * 2; }
  __device__ __forceinline__ int Count() const {
    return item.tile->rows;
  }  // number of keys that exist
  // Negative for keys that see no query or do not exist.
  __device__ __forceinline__ int32_t Id(const TermBackwardKernelParams& params, int half) const {
    const int key = Key(half);
    if (key >= Count()) return -1;
    return params.terms.ranges[item.tile->range_begin]
        .segment_ids[item.batch * item.tile->block_rows + item.tile->row_begin + key];
  }
};

// Bits of the thread's pairs: for each key, those of rows row + 8 n + i at 2 n + i.
using TermBits = uint32_t[2];

// Dropout's bits, as in KeepWords::Thread.
struct KeptBits {
  TermBits bits = {};

  __device__ __forceinline__ bool Has(int n, int half, int i) const {
    return bits[half] >> (n * 2 + i) & 1;
  }
};

template <typename Shape>
struct TermBackwardScores {
  using T = typename Shape::T;
  using Plain = BackwardScores<Shape>;
  using Scores = typename Plain::Scores;
  using Packed = typename Plain::Packed;
  static constexpr int kRows = Shape::kRows;

  static __device__ __forceinline__ bool Has(const TermBits& bits, int n, int half, int i) {
    return bits[half] >> (n * 2 + i) & 1;
  }

  // Loads the mask's bits of the thread's pairs if the tile needs them; otherwise all bits are set.
  static __device__ __forceinline__ void LoadMask(TermBits& mask, const TermQueryTile& tile,
                                                  const TermKeys& keys) {
    mask[0] = mask[1] = 0xffffffff;
    if ((tile.flags & TermQueryTile::kMaskWords) == 0) return;
    const auto* words = static_cast<const typename Shape::Word*>(tile.words) + keys.Row() / 2;
    mask[0] = words[keys.Key(0) * 4];
    mask[1] = words[keys.Key(1) * 4];
  }

  // Computes dropout's bits in each thread separately. Used in kernels with a bias, for which the
  // registers of KeepWords cost more than it saves. Executed by whole warps.
  static __device__ __forceinline__ void KeepPairs(TermBits& keep,
                                                   const TermBackwardKernelParams& params,
                                                   const TermQueryTile& tile,
                                                   const TermKeys& keys) {
    const TermParams& terms = params.terms;
    const uint64_t first_key = static_cast<uint64_t>(tile.first_key) + terms.first_key;
    const uint32_t head = tile.head * terms.head_step + terms.first_head;
    const uint32_t batch = tile.batch_row + terms.first_batch;
    const uint32_t first_row =
        static_cast<uint32_t>(tile.first_query + int64_t{params.stride} * keys.Row()) +
        terms.first_query;
    keep[0] = keep[1] = 0;
    if (params.stride == 1 && first_key % 16 == 0) {
      // A lane and the one four further have keys 2 a and 2 a + 1, and so the same calls. Each lane
      // computes those of every other row, and passes the other lane its bits. The warp's 16 keys
      // use two parts of a call. The code tests whether a part's upper half is kept; a factor of
      // 2^16 moves the lower half there.
      const uint64_t key = first_key + keys.Key(0);
      const uint32_t odd = keys.Key(0) & 1;
      const uint32_t own = odd ? 1 : 0x10000, other = odd ? 0x10000 : 1;
      const bool second = key / 16 % 2 != 0;
      const PhiloxCounterPart counter = CounterPartOf(
          params.keys, static_cast<uint32_t>(4 * (key / 32) + key / 2 % 4), head, batch);
      TermBits others = {};
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const PhiloxBlock x =
            PhiloxOf(params.keys, RowPartOf(params.keys, first_row + n * 8 + odd, head), counter);
        const uint32_t parts[2] = {second ? x.x2 : x.x0, second ? x.x3 : x.x1};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (KeepsUpper(parts[half] * own, terms.threshold)) keep[half] |= 1u << (2 * n);
          if (KeepsUpper(parts[half] * other, terms.threshold)) others[half] |= 1u << (2 * n);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        keep[half] <<= odd;
        keep[half] |= __shfl_xor_sync(0xffffffff, others[half] << odd, 4);
      }
      return;
    }
    PhiloxRow row = {terms.key0, terms.key1, 0, head, batch};
#pragma unroll 1
    for (int pair = 0; pair < kRows / 2; ++pair) {
      const int half = pair & 1, at = pair / 2;
      row.row = first_row + params.stride * (at / 2 * 8 + at % 2);
      const uint64_t key =
          first_key + static_cast<uint64_t>(int64_t{params.stride} * keys.Key(half));
      const uint32_t bit = uint32_t{Keeps(row, key, terms.threshold)} << at;
      if (half == 0) {
        keep[0] |= bit;
      } else {
        keep[1] |= bit;
      }
    }
  }

  // Converts scores to P in place. `statistics` points to those of the thread's first row; `bias`
  // is used with kBiased.
  template <typename Bias>
  static __device__ __forceinline__ void Exponentials(Scores& scores, const TermBits& mask,
                                                      const float* statistics,
                                                      const TermBackwardKernelParams& params,
                                                      const TermQueryTile& tile,
                                                      const TermKeys& keys, const int32_t* tile_ids,
                                                      Bias& bias) {
    const CommonParams& common = params.common;
    float scale = common.softmax_scale, multiplier = common.scale_log2;
    if constexpr (Shape::kBiased) {
      if (params.terms.bias != nullptr) {  // the scores are then in natural units
        bias.Add(scores, scale, params.terms.bias_dtype);
        scale = 1.0f;
        multiplier = kLog2E;
      }
    }
    if (tile.flags & QueryTile::kWide) {
      Wide(scores, statistics, params, tile, keys, scale, multiplier);
    } else {
      Narrow(scores, statistics, params, tile, keys, multiplier);
    }
    Hide(scores, mask, params, tile, keys, tile_ids);
  }

  // Sets P to 0 at pairs that the band, the segments or the mask hide. `tile_ids` are the rows'
  // segments, in shared memory, if the tile needs them.
  static __device__ __forceinline__ void Hide(Scores& scores, const TermBits& mask,
                                              const TermBackwardKernelParams& params,
                                              const TermQueryTile& tile, const TermKeys& keys,
                                              const int32_t* tile_ids) {
    if (tile.flags & QueryTile::kMasked) {
      const VisibleRows visible(tile, keys.Key(0), keys.Row(), keys.Count());
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!visible.Sees(e / 2, n * 8 + e % 2)) scores[n * 4 + e] = 0.0f;
        }
      }
    }
    if (tile.flags & TermQueryTile::kIds) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t id = keys.Id(params, half);
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) {
          const int2 ids = *reinterpret_cast<const int2*>(tile_ids + n * 8 + keys.Row());
          if (id < 0 || ids.x != id) scores[n * 4 + half * 2] = 0.0f;
          if (id < 0 || ids.y != id) scores[n * 4 + half * 2 + 1] = 0.0f;
        }
      }
    }
    if (tile.flags & TermQueryTile::kMaskWords) {
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!Has(mask, n, e / 2, e % 2)) scores[n * 4 + e] = 0.0f;
        }
      }
    }
  }

  // Returns whether Exponential suffices for the tile, as for most tiles without ALiBi. REQUIRES:
  // no bias.
  static __device__ __forceinline__ bool AreNarrow(const TermBackwardKernelParams& params,
                                                   const TermQueryTile& tile) {
    return (tile.flags & QueryTile::kWide) == 0 && params.terms.slopes == nullptr;
  }
  // The part of Exponentials before Hide, for the rows of columns 8 n and the next.
  static __device__ __forceinline__ void Exponential(Scores& scores, const float* statistics, int n,
                                                     float multiplier) {
    const float2 offset = Plain::Offsets(statistics, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = scores[n * 4 + e];
      x = Exp2(fmaf(x, multiplier, e % 2 == 0 ? offset.x : offset.y));
    }
  }

  // A hidden pair contributes nothing, although its rows of v or dout may hold any values. In tiles
  // that hide pairs, dP is therefore set to 0 where P is 0; the rest of the computation is that of
  // the plain kernel. If deltas are not addends, Gradient clears dP - delta later.
  static __device__ __forceinline__ void ClearHidden(const Scores& scores, Scores& gradients,
                                                     const TermQueryTile& tile) {
    if constexpr (Shape::kAddsDeltas) {
      if ((tile.flags & TermQueryTile::kHides) == 0) return;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        if (scores[i] == 0.0f) gradients[i] = 0.0f;
      }
    }
  }

  // Computes the P of dv, and dS, rounded, from the result of Exponentials and dP. `keep` holds
  // dropout's bits, if any.
  template <typename Keep>
  static __device__ __forceinline__ void Differentiate(
      const Scores& scores, const Scores& gradients, Packed& p, Packed& ds, const Keep& keep,
      const float* statistics, const TermQueryTile& tile, const TermParams& terms) {
    if constexpr (Shape::kAddsDeltas) {  // ClearHidden has cleared hidden pairs
      Differentiate<false>(scores, gradients, p, ds, keep, statistics, terms);
      return;
    }
    // Two variants of the rest are faster if most tiles hide nothing and the rest is long, as with
    // dropout.
    if (!Shape::kKeepWords || (tile.flags & TermQueryTile::kHides) != 0) {
      Differentiate<true>(scores, gradients, p, ds, keep, statistics, terms);
    } else {
      Differentiate<false>(scores, gradients, p, ds, keep, statistics, terms);
    }
  }

 private:
  // kHides: some pairs may have been hidden.
  template <bool kHides, typename Keep>
  static __device__ __forceinline__ void Differentiate(const Scores& scores,
                                                       const Scores& gradients, Packed& p,
                                                       Packed& ds, const Keep& keep,
                                                       const float* statistics,
                                                       const TermParams& terms) {
    const bool drops = Shape::Drops(terms);
    const float factor = drops ? Shape::kUnshift * terms.keep_scale : Shape::kUnshift;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 delta = Plain::Deltas(statistics, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = n * 4 + half * 2;
        float kept[2], gradient[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool dropped = drops && !keep.Has(n, half, i);
          const float dp = dropped ? 0.0f : gradients[e + i];
          kept[i] = dropped ? 0.0f : scores[e + i];
          gradient[i] = Gradient<kHides>(scores[e + i], dp, factor, i == 0 ? delta.x : delta.y);
        }
        p[e / 2] = Pack<T>(kept[0], kept[1]);
        ds[e / 2] = Pack<T>(gradient[0], gradient[1]);
      }
    }
  }

  // A hidden pair contributes nothing, although its rows of v or dout may hold any values.
  template <bool kHides>
  static __device__ __forceinline__ float Gradient(float p, float dp, float factor, float delta) {
    const float away = Shape::kAddsDeltas ? dp * factor : fmaf(dp, factor, -delta);
    return kHides && p == 0.0f ? 0.0f : p * away;
  }

  // Returns ALiBi's distance; whole numbers, exact below 2^24.
  static __device__ __forceinline__ float Away(const TermBackwardKernelParams& params,
                                               const TermQueryTile& tile, const TermKeys& keys,
                                               int n, int half, int i) {
    const float stride = static_cast<float>(params.stride);
    const float base = tile.distance + stride * static_cast<float>(keys.Row() - keys.Key(half));
    return fabsf(fmaf(stride, static_cast<float>(n * 8 + i), base));
  }

  // For tiles with wide rows (score_rule.cuh): rounds scores as the forward does
  // (TermForwardScores), which finishes some scores in natural units before it converts them to
  // log2 units. `multiplier` converts scores to log2 units, either alone or after `scale`.
  static __device__ __forceinline__ void Wide(Scores& scores, const float* statistics,
                                              const TermBackwardKernelParams& params,
                                              const TermQueryTile& tile, const TermKeys& keys,
                                              float scale, float multiplier) {
    if (params.terms.slopes != nullptr || multiplier <= 0.0f) {
      multiplier = kLog2E;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = scores[n * 4 + e];
          x = fmaf(x, scale, -tile.slope * Away(params, tile, keys, n, e / 2, e % 2));
        }
      }
    }
    Plain::Wide(scores, statistics + Shape::kLse, multiplier);
  }

  static __device__ __forceinline__ void Narrow(Scores& scores, const float* statistics,
                                                const TermBackwardKernelParams& params,
                                                const TermQueryTile& tile, const TermKeys& keys,
                                                float multiplier) {
    if constexpr (Shape::kAddsOffsets) {
      if ((tile.flags & TermQueryTile::kBent) == 0) {
        const float alibi[2] = {tile.rate * static_cast<float>(keys.Key(0)),
                                tile.rate * static_cast<float>(keys.Key(1))};
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
          scores[i] = Exp2(fmaf(scores[i], multiplier, alibi[i / 2 % 2]));
        }
        return;
      }
    } else if (params.terms.slopes == nullptr) {
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) Exponential(scores, statistics, n, multiplier);
      return;
    }
    const float slope = tile.slope * kLog2E;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 offset = Plain::Offsets(statistics, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = scores[n * 4 + e];
        const float addend = fmaf(-slope, Away(params, tile, keys, n, e / 2, e % 2),
                                  e % 2 == 0 ? offset.x : offset.y);
        x = Exp2(fmaf(x, multiplier, addend));
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_SCORES_CUH_
