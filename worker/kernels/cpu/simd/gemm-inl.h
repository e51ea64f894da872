// The register-blocked product of two packed tiles. Included once per SIMD
// target; `Word` says what a 32-bit word holds:
//   static V MulAdd(D, V left, V right, V sum)   sum + left * right over the word
#if defined(RINGATTN_WORKER_KERNELS_CPU_SIMD_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_WORKER_KERNELS_CPU_SIMD_GEMM_INL_H_
#undef RINGATTN_WORKER_KERNELS_CPU_SIMD_GEMM_INL_H_
#else
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_GEMM_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "worker/kernels/cpu/simd/tile_ops.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// kRows x kVectors accumulators stay in registers: 24 of AVX-512's and NEON's
// 32, 12 of AVX2's 16.
constexpr int kRows = 6;
#if HWY_TARGET == HWY_AVX2
constexpr int kVectors = 2;
#else
constexpr int kVectors = 4;
#endif

template <class Word, int kMr, int kNv, bool kTransposed>
HWY_INLINE void MicroKernel(const GemmArgs& args, const float* HWY_RESTRICT left,
                            const float* HWY_RESTRICT right, int pitch, float* HWY_RESTRICT c,
                            const float* HWY_RESTRICT row_scale) {
  const FloatTag d;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
  const int64_t left_stride = args.left_stride;
  const int depth = args.depth_end - args.depth_begin;
  FloatVec sum[kMr][kNv];
  HWY_UNROLL(6)
  for (int r = 0; r < kMr; ++r) {
    HWY_UNROLL(4)
    for (int n = 0; n < kNv; ++n) sum[r][n] = hn::Zero(d);
  }
  for (int k = 0; k < depth; ++k) {
    FloatVec b[kNv];
    HWY_UNROLL(4)
    for (int n = 0; n < kNv; ++n) b[n] = hn::LoadU(d, right + n * kLanes);
    right += pitch;
    HWY_UNROLL(6)
    for (int r = 0; r < kMr; ++r) {
      const FloatVec a = hn::Set(d, kTransposed ? left[r] : left[r * left_stride]);
      HWY_UNROLL(4)
      for (int n = 0; n < kNv; ++n) sum[r][n] = Word::MulAdd(d, a, b[n], sum[r][n]);
    }
    left += kTransposed ? left_stride : 1;
  }
  HWY_UNROLL(6)
  for (int r = 0; r < kMr; ++r) {
    float* HWY_RESTRICT target = c + r * args.c_stride;
    if (!args.accumulate) {
      HWY_UNROLL(4)
      for (int n = 0; n < kNv; ++n) hn::StoreU(sum[r][n], d, target + n * kLanes);
      continue;
    }
    const FloatVec scale = hn::Set(d, row_scale == nullptr ? 1.0f : row_scale[r]);
    HWY_UNROLL(4)
    for (int n = 0; n < kNv; ++n) {
      hn::StoreU(hn::MulAdd(hn::LoadU(d, target + n * kLanes), scale, sum[r][n]), d,
                 target + n * kLanes);
    }
  }
}

// kMr rows at a time while they last; the rows that remain follow in smaller
// blocks. Returns the first row not done.
template <class Word, int kMr, int kNv, bool kTransposed>
HWY_INLINE int BlockRows(const GemmArgs& args, int row, const float* left, const float* right,
                         int pitch, float* c) {
  for (; row + kMr <= args.rows; row += kMr) {
    MicroKernel<Word, kMr, kNv, kTransposed>(
        args, left + (kTransposed ? row : row * args.left_stride), right, pitch,
        c + row * args.c_stride, args.row_scale == nullptr ? nullptr : args.row_scale + row);
  }
  return row;
}

// All rows of one column panel.
template <class Word, int kNv, bool kTransposed>
HWY_NOINLINE void PanelRows(const GemmArgs& args, const float* right, int pitch, float* c) {
  const float* left =
      args.left + (kTransposed ? args.depth_begin * args.left_stride : int64_t{args.depth_begin});
  int row = 0;
  row = BlockRows<Word, kRows, kNv, kTransposed>(args, row, left, right, pitch, c);
  row = BlockRows<Word, 4, kNv, kTransposed>(args, row, left, right, pitch, c);
  row = BlockRows<Word, 2, kNv, kTransposed>(args, row, left, right, pitch, c);
  BlockRows<Word, 1, kNv, kTransposed>(args, row, left, right, pitch, c);
}

template <class Word, bool kTransposed>
void GemmPanels(const GemmArgs& args) {
  const int lanes = static_cast<int>(hn::Lanes(FloatTag()));
  const int panel = kVectors * lanes;
  for (int col = args.col_begin; col < args.col_end; col += panel) {
    // The pitch is that of the packed operand, even if fewer columns are requested.
    const int pitch = std::min(panel, args.right_cols - col);
    const int vectors = (std::min(args.col_end - col, pitch) + lanes - 1) / lanes;
    const float* right =
        args.right + int64_t{col} * args.right_depth + int64_t{args.depth_begin} * pitch;
    float* c = args.c + col;
    switch (vectors) {
      case 1:
        PanelRows<Word, 1, kTransposed>(args, right, pitch, c);
        break;
      case 2:
        PanelRows<Word, 2, kTransposed>(args, right, pitch, c);
        break;
#if HWY_TARGET != HWY_AVX2
      case 3:
        PanelRows<Word, 3, kTransposed>(args, right, pitch, c);
        break;
      case 4:
        PanelRows<Word, 4, kTransposed>(args, right, pitch, c);
        break;
#endif
    }
  }
}

template <class Word>
void Gemm(const GemmArgs& args) {
  if (args.left_transposed) {
    GemmPanels<Word, true>(args);
  } else {
    GemmPanels<Word, false>(args);
  }
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
