// The computation of a forward's consumer thread on scores with terms, between the product and the
// softmax. A thread has two rows (eight apart), columns 8 n + 2 q and the next, as in
// forward_softmax.cuh. The order is that of docs/semantics.md: scale, softcap, bias, ALiBi, masks.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_SCORES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_SCORES_CUH_

#include "worker/kernels/cuda/plan/keep_bits.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_epilogue.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/terms/philox_doubles.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// Returns the head of a packed row of an item.
__device__ __forceinline__ int HeadOf(const TermForwardKernelParams& params, const WorkSlot& slot,
                                      int packed_row) {
  const int pack = params.forward.head_pack;
  return slot.first_head + (pack == 1 ? 0 : packed_row % pack);
}

// Returns ALiBi's slope of a head of an item. `tile`: any tile of the item. REQUIRES: there are
// slopes.
__device__ __forceinline__ float SlopeOf(const TermForwardKernelParams& params,
                                         const WorkSlot& slot, const TermKeyTile& tile, int head) {
  const TermParams& terms = params.terms;
  const int64_t row = terms.packed ? tile.batch_row : slot.batch;
  return terms.slopes[(terms.slopes_per_batch ? row * params.forward.common.num_heads : 0) + head];
}

// The thread's two rows of an item, in shared memory because registers are short.
struct TermRows {
  TermRow* upper;  // the lower row is eight further

  static constexpr int32_t kUnread = -2;

  __device__ __forceinline__ const TermRow& Of(int half) const { return upper[half * 8]; }

  // kIds: also loads the ids. Executed by one whole warp. `tile`: any tile of the item.
  template <bool kDrops, bool kIds>
  __device__ __forceinline__ void Load(const TermForwardKernelParams& params, const WorkSlot& slot,
                                       int packed_row, const TermKeyTile& tile) const {
    const TermParams& terms = params.terms;
    const int pack = params.forward.head_pack;
    __syncwarp();  // all lanes have read the rows of the last item
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int packed = packed_row + half * 8;
      const int head = HeadOf(params, slot, packed);
      TermRow row = {0.0f, kIds ? -1 : kUnread, packed / pack, 0, 0, 0, {}};
      if (terms.slopes != nullptr) {
        row.slope = SlopeOf(params, slot, tile, head);
      }
      if (kIds && packed < slot.tile.q_rows * pack && terms.q_segment_ids != nullptr) {
        row.id = IdOf(params, slot, row.q_row);
      }
      if (kDrops && terms.threshold != 0) {
        row.query = static_cast<uint32_t>(tile.first_query + int64_t{params.stride} * row.q_row) +
                    terms.first_query;
        row.head = head * terms.head_step + terms.first_head;
        row.batch = tile.batch_row + terms.first_batch;
        row.part = RowPartOf(params.keys, row.query, row.head);
      }
      if ((threadIdx.x & 3) == 0) upper[half * 8] = row;
    }
    __syncwarp();
  }

  // Loads the ids, once per item: if segments are long, few tiles need them. Executed by one whole
  // warp.
  __device__ __forceinline__ void LoadIds(const TermForwardKernelParams& params,
                                          const WorkSlot& slot, int packed_row) const {
    if (!__any_sync(0xffffffff, Of(0).id == kUnread)) return;
    const int rows = slot.tile.q_rows * params.forward.head_pack;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t id = packed_row + half * 8 < rows ? IdOf(params, slot, Of(half).q_row) : -1;
      __syncwarp();
      if ((threadIdx.x & 3) == 0) upper[half * 8].id = id;
    }
    __syncwarp();
  }

 private:
  static __device__ __forceinline__ int32_t IdOf(const TermForwardKernelParams& params,
                                                 const WorkSlot& slot, int q_row) {
    const int64_t row = slot.tile.q_row_begin + q_row;
    return max(params.terms.q_segment_ids[slot.batch * params.forward.common.q_rows + row], -1);
  }
};

template <typename Shape>
struct TermForwardScores {
  using T = typename Shape::T;
  static constexpr int kKeys = Shape::kKeys;
  using Scores = float[kKeys / 2];

  // Returns whether Apply leaves scores in natural units, finished; otherwise as the product left
  // them.
  static __device__ __forceinline__ bool Transforms(const TermForwardKernelParams& params) {
    if constexpr (Shape::kAlibi) return false;
    const CommonParams& common = params.forward.common;
    return common.softcap > 0.0f || common.scale_log2 <= 0.0f || params.terms.slopes != nullptr ||
           (Shape::kBiased && params.terms.bias != nullptr);
  }

  // `flags` are the tile's; `column` is the thread's first, 2 (lane mod 4). `words` are those of
  // the mask and `tile_ids` the keys' segments in shared memory, both if the tile needs them.
  // `bias` is used with kBiased.
  template <typename Bias>
  static __device__ __forceinline__ void Apply(Scores& scores,
                                               const TermForwardKernelParams& params,
                                               const TermKeyTile& tile, int flags,
                                               const TermRows& rows, int column,
                                               const uint32_t (&words)[2], const int32_t* tile_ids,
                                               Bias& bias, bool transforms) {
    if (transforms) Transform(scores, params, tile, rows, column, bias);
    if (flags & KeyTile::kMasked) {
      const int q_rows[2] = {rows.Of(0).q_row, rows.Of(1).q_row};
      MaskScores(scores, tile, q_rows, column);
    }
    if (flags & TermKeyTile::kIds) {
      const int32_t own[2] = {rows.Of(0).id, rows.Of(1).id};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const int2 ids = *reinterpret_cast<const int2*>(tile_ids + n * 8 + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Hide(scores[n * 4 + half * 2], ids.x != own[half] || own[half] < 0);
          Hide(scores[n * 4 + half * 2 + 1], ids.y != own[half] || own[half] < 0);
        }
      }
    }
    if (flags & TermKeyTile::kMaskWords) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Hide(scores[n * 4 + half * 2 + i], (words[half] >> (n * 2 + i) & 1) == 0);
          }
        }
      }
    }
  }

  // Returns the position of the thread's first column, as dropout counts it.
  static __device__ __forceinline__ uint64_t KeyOf(const TermForwardKernelParams& params,
                                                   const TermKeyTile& tile, int column) {
    return static_cast<uint64_t>(tile.first_key) +
           static_cast<uint64_t>(int64_t{params.stride} * column) + params.terms.first_key;
  }

  // Computes which of the thread's pairs dropout keeps: of each row, column 8 j + i at bit 16 i +
  // j. `key` is the tile's KeyOf. A Philox call covers the eight keys that a thread has among 32
  // columns; all of its 128 bits are used in place.
  static __device__ __forceinline__ void KeepPairs(uint32_t (&keep)[2],
                                                   const TermForwardKernelParams& params,
                                                   const TermRows& rows, uint64_t key) {
    const uint32_t head = rows.Of(0).head, batch = rows.Of(0).batch;
    if (params.stride != 1 || key % 2 != 0 || key / 8 % 4 != 0 ||
        rows.Of(1).head != head) {  // packed heads
      KeepAnywhere(keep, params, rows, key);
      return;
    }
    const uint32_t counter = static_cast<uint32_t>(4 * (key / 32) + key / 2 % 4);
    KeepSum sums[2] = {KeepSum(params.terms.threshold), KeepSum(params.terms.threshold)};
#pragma unroll
    for (int word = 0; word < kKeys / 32; ++word) {
      const PhiloxCounterPart part = CounterPartOf(params.keys, counter + 4 * word, head, batch);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PhiloxBlock x = PhiloxOf(params.keys, rows.Of(half).part, part);
        const uint32_t parts[4] = {x.x0, x.x1, x.x2, x.x3};
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[half].Add(parts[n], word * 4 + n);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) keep[half] = sums[half].Bits();
  }

  // The input of KeptProbabilities for a tile, read while the tile's description is valid. Nearly
  // all tiles are consecutive keys from a multiple of 32, with one head for the thread's rows. Then
  // the input is the number of the thread's first Philox call; otherwise it is the bits.
  struct KeptTile {
    uint32_t keep[2];
    bool by_calls;
  };

  static __device__ __forceinline__ KeptTile KeptTileOf(const TermForwardKernelParams& params,
                                                        const TermRows& rows,
                                                        const TermKeyTile& tile, int column) {
    KeptTile kept;
    const uint64_t first = static_cast<uint64_t>(tile.first_key) + params.terms.first_key;
    const int pack = params.forward.head_pack;
    kept.by_calls = params.stride == 1 && first % 32 == 0 && pack <= 8 && (pack & (pack - 1)) == 0;
    if (kept.by_calls) {
      kept.keep[0] = static_cast<uint32_t>(first / 8) + column / 2;
      kept.keep[1] = 0;
    } else {
      KeepAnywhere(kept.keep, params, rows, KeyOf(params, tile, column));
    }
    return kept;
  }

  // Converts scores to probabilities, adds them to the sums, and packs those that dropout keeps.
  // The exponentials, each of which takes one unit as long as eight instructions, are placed
  // between the Philox rounds that decide about them; otherwise ptxas would place all of them
  // first, and wait. To achieve this, each four exponentials use a multiplier that is combined,
  // through bits that are always 0, with the result of a round.
  static __device__ __forceinline__ void KeptProbabilities(
      const Scores& scores, float multiplier, RowStates& rows, uint32_t (&p)[kKeys / 4],
      const TermForwardKernelParams& params, const TermRows& own, const KeptTile& kept) {
    float sums[4] = {};  // of each row's even and odd columns
    // For block n of eight columns.
    const auto exponentials = [&](int n, int half, float factor) {
      const float a = Exp2(fmaf(scores[n * 4 + half * 2], factor, -rows.offset[half]));
      const float b = Exp2(fmaf(scores[n * 4 + half * 2 + 1], factor, -rows.offset[half]));
      sums[half * 2] += a;
      sums[half * 2 + 1] += b;
      p[n * 2 + half] = Pack<T>(a, b);
    };
    if (kept.by_calls) {
      const KeepMask mask(params.terms.threshold);
      const uint32_t head = own.Of(0).head, batch = own.Of(0).batch;
      constexpr int kWords = 2;  // whose calls run together: four with both rows
      // Measured: 0.97 of the time in the wider class, 1.02 in the other.
      constexpr bool kAlternates = Shape::kDim == 128;
      float factors[2] = {multiplier, multiplier};
      uint32_t counter = kept.keep[0];
      PhiloxRunning x[kWords][2];
#pragma unroll
      for (int first = 0; first < kKeys / 32; first += kWords) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const PhiloxCounterPart part =
              CounterPartOf(params.keys, counter + 4 * (first + word), head, batch);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const PhiloxBlock begun = JoinPhilox(own.Of(half).part, part);
            x[word][half] =
                kAlternates && first > 0 ? x[word][half].Again(begun) : PhiloxRunning::Of(begun);
          }
        }
#pragma unroll
        for (int round = kPhiloxJoined; round < kPhiloxRounds; ++round) {
          const int step = round - kPhiloxJoined;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (step % 2 == 0) {
#pragma unroll
              for (int i = 0; i < kWords; ++i) {
                exponentials(first * 4 + step / 2 * kWords + i, half, factors[half]);
              }
            }
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
              x[word][half] = PhiloxRoundOfDoubles<kAlternates>(params.keys, x[word][half], round);
            }
            if (step % 2 == 1 || round == kPhiloxRounds - 1) {
              factors[half] = __int_as_float(__float_as_int(multiplier) |
                                             (x[half % kWords][half].x1 & params.zero));
            }
          }
        }
        counter |= x[0][0].x1 & params.zero;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const PhiloxBlock call = x[word][half].Block();
            const uint32_t parts[4] = {call.x0, call.x1, call.x2, call.x3};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              p[((first + word) * 4 + i) * 2 + half] &= mask.Of(parts[i]);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          exponentials(n, half, multiplier);
          p[n * 2 + half] &= (kept.keep[half] >> n & 0x10001) * 0xffff;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.sum[half] += sums[half * 2] + sums[half * 2 + 1];
  }

  // Sets the values of dropped pairs to 0: probabilities, whose sum was computed before, or their
  // gradients.
  static __device__ __forceinline__ void Drop(Scores& values, const uint32_t (&keep)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // adjacent bits become predicates seven at a time
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          if ((keep[half] >> (i * 16 + n) & 1) == 0) values[n * 4 + half * 2 + i] = 0.0f;
        }
      }
    }
  }

 private:
  // The same for any offset, stride and heads.
  static __device__ __forceinline__ void KeepAnywhere(uint32_t (&keep)[2],
                                                      const TermForwardKernelParams& params,
                                                      const TermRows& rows, uint64_t key) {
    const TermParams& terms = params.terms;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const PhiloxRow row = {terms.key0, terms.key1, rows.Of(half).query, rows.Of(half).head,
                             rows.Of(half).batch};
      const uint32_t bits =
          ByHalves(params.stride == 1 ? KeepBits(row, key, terms.threshold)
                                      : StridedKeepBits(row, key, params.stride, terms.threshold));
      if (half == 0) {
        keep[0] = bits;
      } else {
        keep[1] = bits;
      }
    }
  }

  static __device__ __forceinline__ void Hide(float& score, bool hidden) {
    if (hidden) score = NegativeInfinity();
  }

  template <typename Bias>
  static __device__ __forceinline__ void Transform(Scores& scores,
                                                   const TermForwardKernelParams& params,
                                                   const TermKeyTile& tile, const TermRows& rows,
                                                   int column, Bias& bias) {
    const CommonParams& common = params.forward.common;
    const bool capped = common.softcap > 0.0f;
    const Softcap cap(common);
    const float scale = common.softmax_scale;
    const bool biased = Shape::kBiased && params.terms.bias != nullptr;
    const bool inside = biased && capped && params.terms.bias_before_softcap;
    if (!biased && !capped && params.terms.slopes == nullptr) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] *= scale;
      return;
    }
    if constexpr (Shape::kBiased) {
      // The cap and the bias, in either order. A loop, because the code of each is long.
      const bool bias_first = inside || !capped;
      const float inner = inside ? 1.0f / common.softcap : cap.inner;
#pragma unroll 1
      for (int step = 0; step < static_cast<int>(biased) + static_cast<int>(capped); ++step) {
        if (biased && (step == 0) == bias_first) {
          bias.Add(scores, bias_first ? scale : 1.0f, params.terms.bias_dtype);
          continue;
        }
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const float x = scores[i];  // -inf comes from a bias and is kept
          scores[i] = x == NegativeInfinity() ? x : common.softcap * Tanh(x * inner);
        }
      }
    } else if (capped) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] = common.softcap * cap.Tangent(scores[i]);
    }
    if (params.terms.slopes == nullptr) return;
    // From here on the multiplier of the scores is 1, unless they are still raw.
    const bool raw = !capped && !biased;
    const float factor = raw ? scale : 1.0f;
    const float stride = static_cast<float>(params.stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Whole numbers, exact below 2^24.
      const float distance =
          tile.distance + stride * static_cast<float>(rows.Of(half).q_row - column);
      const float slope = rows.Of(half).slope;
      // For keys before the row, as under a causal mask, distances that count down to the nearest
      // key's need no absolute value. They round only the product of the nearest one.
      constexpr int kNearest = kKeys - 7;
      const float nearest = fmaf(-stride, static_cast<float>(kNearest), distance);
      if (__all_sync(0xffffffff, nearest >= 0.0f)) {
        const float base = -slope * nearest, step = slope * stride;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[n * 4 + half * 2 + i];
            const float columns = static_cast<float>(n * 8 + i - kNearest);
            score = fmaf(score, factor, fmaf(step, columns, base));
          }
        }
        continue;
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n * 4 + half * 2 + i];
          const float away = fabsf(fmaf(-stride, static_cast<float>(n * 8 + i), distance));
          score = fmaf(score, factor, -slope * away);
        }
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_SCORES_CUH_
