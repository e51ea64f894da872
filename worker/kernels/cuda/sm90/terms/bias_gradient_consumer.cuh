// A consumer warpgroup of a bias's gradient. It computes dS = P (dout v^T - delta) of 64 q rows
// with the keys of every job, sums it over the jobs that share elements of the gradient, and stores
// the sum. The order of the sum is that of heads and batch rows, so equal calls give equal bits.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_CONSUMER_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms/bias_gradient_shape.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_bias.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_scores.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct BiasGradientConsumer {
  using Plain = ForwardConsumer<Shape>;
  using Rules = TermForwardScores<Shape>;
  using T = typename Shape::T;
  using Scores = float[Shape::kKeys / 2];

  // Statistics of the thread's two rows in one head.
  struct RowStatistics {
    float lse[2];  // +inf if the row saw no key or does not exist: P is 0
    float delta[2];
    bool wide;  // a row of the warp is wide (score_rule.cuh)

    // Executed by one whole warp.
    __device__ __forceinline__ void Load(const BiasGradientKernelParams& params,
                                         const WorkSlot& slot, int row) {
      const CommonParams& common = params.forward.common;
      const int64_t first =
          (int64_t{slot.batch} * common.num_heads + slot.first_head) * common.q_rows +
          slot.tile.q_row_begin + row;
      bool any = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool exists = row + half * 8 < slot.tile.q_rows;
        const float x = exists ? params.lse[first + half * 8] : NegativeInfinity();
        const bool keyless = x == NegativeInfinity();
        lse[half] = keyless ? -x : x;
        any |= !keyless && IsWide(x);
        delta[half] = exists ? params.delta[first + half * 8] : 0.0f;
      }
      wide = __any_sync(0xffffffff, any);
    }
  };

  // Converts finished scores, in natural units, to P.
  static __device__ __forceinline__ void Exponentials(Scores& scores, const RowStatistics& rows) {
    if (rows.wide) {  // rounded as the forward's: to log2 units and back
#pragma unroll
      for (int i = 0; i < Shape::kKeys / 2; ++i) {
        const float x = WideLogProbability(WideScore(scores[i], kLog2E), rows.lse[i / 2 % 2]);
        scores[i] = Exp2(x * kLog2E);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 2; ++i) {
      scores[i] = Exp2(__fsub_rn(scores[i], rows.lse[i / 2 % 2]) * kLog2E);
    }
  }

  // Converts dP to dS in place; dropped pairs have a dP of 0. A pair with probability 0
  // contributes nothing for any value of its dP.
  static __device__ __forceinline__ void Differentiate(const Scores& p, Scores& gradients,
                                                       const RowStatistics& rows, float factor) {
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 2; ++i) {
      const float x = p[i] * fmaf(gradients[i], factor, -rows.delta[i / 2 % 2]);
      gradients[i] = p[i] == 0.0f ? 0.0f : x;
    }
  }

  // Stores the thread's sums. Columns outside the range belong to another block.
  static __device__ __forceinline__ void Store(const BiasGradientKernelParams& params,
                                               const BiasGradientItem& item,
                                               const GradientTile& tile, const Scores& sums,
                                               int row) {
    const TermParams& terms = params.terms;
    const bool wide = terms.bias_dtype == DType::kFloat32;
    const bool vectors = params.vectors && tile.first_element % 8 == 0;
    const int q = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = row + half * 8;
      const bool exists = local < item.tile->q_rows;
      const int columns = exists ? tile.columns : 0;
      const int64_t at = tile.first_element + local * terms.columns;
      if (vectors && !wide) {
        StoreVectors(static_cast<T*>(params.dbias) + at, sums, half, q, columns);
        continue;
      }
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; ++n) {
        const int column = n * 8 + q * 2;
        const float x = sums[n * 4 + half * 2], y = sums[n * 4 + half * 2 + 1];
        if (wide && vectors && column + 1 < columns) {
          *reinterpret_cast<float2*>(static_cast<float*>(params.dbias) + at + column) =
              make_float2(x, y);
          continue;
        }
        StoreOne(params, at, column, columns, x);
        StoreOne(params, at, column + 1, columns, y);
      }
    }
  }

 private:
  static __device__ __forceinline__ void StoreOne(const BiasGradientKernelParams& params,
                                                  int64_t at, int column, int columns, float x) {
    if (column >= columns) return;
    const int64_t element = at + int64_t{params.stride} * column;
    if (params.terms.bias_dtype == DType::kFloat32) {
      static_cast<float*>(params.dbias)[element] = x;
    } else {
      static_cast<T*>(params.dbias)[element] = FromFloat<T>(x);
    }
  }

  // The four lanes of a row exchange their values of 32 columns, and store eight each.
  static __device__ __forceinline__ void StoreVectors(T* target, const Scores& sums, int half,
                                                      int q, int columns) {
#pragma unroll
    for (int group = 0; group < Shape::kKeys / 32; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const pair = sums + (group * 4 + j) * 4 + half * 2;
        words[j] = Pack<T>(pair[0], pair[1]);
      }
      TransposeQuad(words, q);
      const int column = (group * 4 + q) * 8;
      if (column + 8 <= columns) {
        *reinterpret_cast<uint4*>(target + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= columns) break;
        reinterpret_cast<uint16_t*>(target)[column + i] =
            static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      }
    }
  }

 public:
  // `group` is the index of the consumer warpgroup, the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const BiasGradientKernelParams& params, char* memory,
                                             uint32_t shared, const BiasGradientItem& item,
                                             int group) {
    const TermParams& terms = params.terms;
    const int lane = threadIdx.x & 31;
    const int row = group * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
    const uint32_t q = RowDescriptor(shared + Shape::kQ + group * 64 * kPanelRowBytes);
    const uint32_t dout = RowDescriptor(shared + Shape::kDout + group * 64 * kPanelRowBytes);
    const uint32_t k_stages = RowDescriptor(shared + Shape::kK);
    const uint32_t v_stages = RowDescriptor(shared + Shape::kV);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kKvBytes);
    const GradientTile* tiles = reinterpret_cast<const GradientTile*>(memory + Shape::kTermTiles);
    const TermRows own = {reinterpret_cast<TermRow*>(memory + Shape::kRowTerms) + row};
    const auto release = [lane](uint32_t barrier) { ArriveWarp(barrier, lane); };
    ForwardBias<Shape> bias(shared, group);
    RowStatistics rows = {};
    Scores scores, gradients, sums;
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 2; ++i) sums[i] = 0.0f;
    RingPosition<Shape::kStages> at, kv;
    uint32_t q_phase = 0;
    bool last;
    // Sums are stored while the next job's products run.
    bool stores = false;
    uint32_t stored = 0;  // stage of the job of these sums
    const auto store = [&] {
      if (!stores) return;
      Store(params, item, tiles[stored], sums, row);
      release(shared + Shape::kTileEmpty + 8 * stored);
    };
#pragma unroll 1
    do {
      WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
      const GradientTile& tile = tiles[at.stage];
      const int flags = tile.flags;
      last = flags & KeyTile::kLast;
      if (flags & GradientTile::kNewQ) {
        WorkSlot slot = {};
        slot.tile = *item.tile;
        slot.first_head = tile.head;
        slot.batch = tile.batch;
        own.Load<true, true>(params, slot, row, tile);
        rows.Load(params, slot, row);
        WaitBarrier(shared + Shape::kQFull, q_phase);
        q_phase ^= 1;
      }
      // If the stage is kept from the preceding job, its phase has already passed.
      WaitBarrier(shared + Shape::kKFull + 8 * kv.stage, kv.phase);
      Plain::IssueScores(scores, q, k_stages + kv.stage * kStageStep);
      WaitBarrier(shared + Shape::kVFull + 8 * kv.stage, kv.phase);
      Plain::IssueScores(gradients, dout, v_stages + kv.stage * kStageStep);
      store();
      uint32_t words[2] = {};
      if (flags & TermKeyTile::kMaskWords) {
        words[0] = tile.words[row * 4 + lane % 4] >> tile.word_shift;
        words[1] = tile.words[(row + 8) * 4 + lane % 4] >> tile.word_shift;
      }
      const bool drops = terms.threshold != 0;
      uint32_t keep[2];
      if (drops) Rules::KeepPairs(keep, params, own, Rules::KeyOf(params, tile, lane % 4 * 2));
      WaitProducts<1>();
      PinRegisters(scores);
      Rules::Apply(
          scores, params, tile, flags, own, lane % 4 * 2, words,
          reinterpret_cast<const int32_t*>(memory + Shape::kIds + at.stage * Shape::kIdBytes), bias,
          true);
      Exponentials(scores, rows);
      PinRegisters(scores);  // otherwise the exponentials would move below the wait
      WaitProducts<0>();
      PinRegisters(gradients);
      if (flags & GradientTile::kLastQ) release(shared + Shape::kQEmpty);
      if (flags & GradientTile::kLastKv) {
        release(shared + Shape::kKvEmpty + 8 * kv.stage);
        kv.Advance();
      }
      if (drops) {
        Rules::Drop(gradients, keep);
      }
      Differentiate(scores, gradients, rows, drops ? terms.keep_scale : 1.0f);
      const bool first = flags & GradientTile::kFirst;
#pragma unroll
      for (int i = 0; i < Shape::kKeys / 2; ++i) {
        sums[i] = first ? gradients[i] : sums[i] + gradients[i];
      }
      stores = flags & GradientTile::kStore;
      stored = at.stage;
      if (!stores) release(shared + Shape::kTileEmpty + 8 * at.stage);
      at.Advance();
    } while (!last);
    store();
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_CONSUMER_CUH_
