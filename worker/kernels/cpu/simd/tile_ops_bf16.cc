// TileOps on AVX-512 BF16: products of bf16 pairs with fp32 sums.
#include <cstdint>

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/kernels/cpu/simd/tile_ops_bf16.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3
// Highway 1.0.3 has no target with these instructions: its AVX-512 target is
// compiled in this file, with all it includes below, for a superset.
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16"
#endif
#include "worker/kernels/cpu/simd/gemm-inl.h"
#include "worker/kernels/cpu/simd/pack-inl.h"
#include "worker/kernels/cpu/simd/softmax-inl.h"
#include "worker/kernels/cpu/simd/tile_ops.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int kLanes = 16;
constexpr int kPanel = kVectors * kLanes;

HWY_INLINE __m512bh AsPairs(FloatVec v) { return (__m512bh)_mm512_castps_si512(v.raw); }

struct Bf16PairWord {
  static HWY_INLINE FloatVec MulAdd(FloatTag, FloatVec left, FloatVec right, FloatVec sum) {
    return FloatVec{_mm512_dpbf16_ps(sum.raw, AsPairs(left), AsPairs(right))};
  }
};

// Sixteen fp32 values as bf16, round to nearest even.
HWY_INLINE __m256i ToBf16(FloatVec v) { return (__m256i)_mm512_cvtneps_pbh(v.raw); }

// Weights of one row: consecutive columns share a word.
struct StoreBf16Pairs {
  static HWY_INLINE void One(FloatTag, FloatVec value, float* words, int col) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + col / 2), ToBf16(value));
  }
  static HWY_INLINE void Two(FloatTag, FloatVec first, FloatVec second, float* words, int col) {
    const __m512bh both = _mm512_cvtne2ps_pbh(second.raw, first.raw);
    _mm512_storeu_si512(words + col / 2, (__m512i)both);
  }
};

// Lane order that makes words (a0 b0) (a1 b1) ... of sixteen a and sixteen b.
HWY_INLINE __m512i InterleaveIndex() {
  alignas(64) uint16_t index[32];
  for (int i = 0; i < 16; ++i) {
    index[2 * i] = static_cast<uint16_t>(i);
    index[2 * i + 1] = static_cast<uint16_t>(16 + i);
  }
  return _mm512_load_si512(index);
}

void PackLeft(const SourceRows& source, bool negate, float* target, int64_t target_stride) {
  const __m512i sign = _mm512_set1_epi16(negate ? static_cast<int16_t>(0x8000) : 0);
  const int words = (source.cols + 1) / 2;
  for (int r = 0; r < source.rows; ++r) {
    const uint16_t* in = static_cast<const uint16_t*>(source.data) + source.RowOffset(r);
    uint16_t* out = reinterpret_cast<uint16_t*>(target + r * target_stride);
    for (int col = 0; col < source.cols; col += 32) {
      const int count = source.cols - col;
      const __mmask32 read = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
      const int padded = 2 * words - col;
      const __mmask32 write = padded >= 32 ? ~__mmask32{0} : (__mmask32{1} << padded) - 1;
      const __m512i v = _mm512_xor_si512(_mm512_maskz_loadu_epi16(read, in + col), sign);
      _mm512_mask_storeu_epi16(out + col, write, v);
    }
  }
}

void PackRightTransposed(const SourceRows& source, float* target, float* /*scratch*/) {
  TransposeRows(static_cast<const char*>(source.data), source.row_stride * 2, source.rows,
                source.cols * 2, kPanel, target);
}

bool PackRight(const SourceRows& source, float* target) {
  const int depth = (source.rows + 1) / 2;
  const int cols = (source.cols + kLanes - 1) / kLanes * kLanes;
  const __m512i index = InterleaveIndex();
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 poison = 0;
  for (int begin = 0; begin < cols; begin += kPanel) {
    const int pitch = std::min(kPanel, cols - begin);
    for (int word = 0; word < depth; ++word) {
      const bool has_second = 2 * word + 1 < source.rows;
      const uint16_t* in0 =
          static_cast<const uint16_t*>(source.data) + source.RowOffset(2 * word) + begin;
      const uint16_t* in1 = static_cast<const uint16_t*>(source.data) + begin +
                            (has_second ? source.RowOffset(2 * word + 1) : 0);
      float* out = target + int64_t{begin} * depth + int64_t{word} * pitch;
      for (int col = 0; col < pitch; col += kLanes) {
        const int count = source.cols - begin - col;
        const __mmask16 mask = count >= 16 ? 0xffff : (1 << std::max(count, 0)) - 1;
        const __m256i first = _mm256_maskz_loadu_epi16(mask, in0 + col);
        const __m256i second =
            _mm256_maskz_loadu_epi16(has_second ? mask : __mmask16{0}, in1 + col);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        poison |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
        _mm512_storeu_si512(out + col, _mm512_permutexvar_epi16(index, both));
      }
    }
  }
  return poison != 0;
}

template <bool kTerms>
void GradientRows(const GradientArgs& args) {
  const FloatTag d;
  const __m512i index = InterleaveIndex();
  for (int r = 0; r < args.rows; r += 2) {
    const bool has_second = r + 1 < args.rows;
    const int r1 = has_second ? r + 1 : r;
    const RowSpan span0(args.col_begin, args.col_end, args.visible_begin[r], args.visible_end[r],
                        kLanes);
    const RowSpan span1(args.col_begin, args.col_end, args.visible_begin[r1], args.visible_end[r1],
                        kLanes);
    const bool wide0 = HasWideScores(args, r), wide1 = HasWideScores(args, r1);
    float* p_words = args.p + r / 2 * args.stride;
    float* ds_words = args.ds + r / 2 * args.stride;
    float* ds_rows = args.ds_rows + r * args.ds_rows_stride;
    for (int col = args.col_begin; col < args.col_end; col += kLanes) {
      FloatVec p0 = hn::Zero(d), p1 = p0, ds0 = p0, ds1 = p0;
      if (col >= span0.first && col < span0.last)
        GradientOf<kTerms>(d, args, span0, wide0, r, col, p0, ds0);
      if (has_second && col >= span1.first && col < span1.last) {
        GradientOf<kTerms>(d, args, span1, wide1, r1, col, p1, ds1);
      }
      if (kTerms && args.exact_ds != nullptr) {
        hn::StoreU(ds0, d, args.exact_ds + r * args.stride + col);
        if (has_second) hn::StoreU(ds1, d, args.exact_ds + r1 * args.stride + col);
      }
      const __m512i p = (__m512i)_mm512_cvtne2ps_pbh(p1.raw, p0.raw);
      const __m512i ds = (__m512i)_mm512_cvtne2ps_pbh(ds1.raw, ds0.raw);
      _mm512_storeu_si512(p_words + col, _mm512_permutexvar_epi16(index, p));
      _mm512_storeu_si512(ds_words + col, _mm512_permutexvar_epi16(index, ds));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(ds_rows + col / 2),
                          _mm512_castsi512_si256(ds));
      if (has_second) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(ds_rows + args.ds_rows_stride + col / 2),
                            _mm512_extracti64x4_epi64(ds, 1));
      }
    }
  }
}

void Gradient(const GradientArgs& args) {
  if (args.terms) return GradientRows<true>(args);
  GradientRows<false>(args);
}

}  // namespace

const TileOps* GetBf16TileOps() {
  static const TileOps ops = {
      "AVX512_BF16",
      2,
      kLanes,
      kPanel,
      &PackLeft,
      &PackRightTransposed,
      &PackRight,
      &Gemm<Bf16PairWord>,
      &Softmax<StoreBf16Pairs>,
      &Gradient,
  };
  return &ops;
}

}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#if HWY_ONCE
namespace ringattn::worker::cpu {

const TileOps* Avx512Bf16TileOps() {
#if HWY_TARGETS & HWY_AVX3
  // hwy::SupportedTargets would execute cpuid, which a virtual machine traps. fp32 arithmetic has
  // 16 lanes exactly where AVX-512 is chosen.
  const bool supported = Float32TileOps().lanes == 16 && __builtin_cpu_supports("avx512bf16");
  return supported ? N_AVX3::GetBf16TileOps() : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace ringattn::worker::cpu
#endif  // HWY_ONCE
