// TileOps in fp32 arithmetic: bf16 and fp16 become fp32 when they are packed.
#include <cstdint>
#include <cstring>

// SVE and RVV vectors have no size at compile time, which register blocking
// needs; such machines use NEON or the scalar version. There is no separate version for processors
// with SSE only.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/kernels/cpu/simd/tile_ops_f32.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "worker/kernels/cpu/simd/convert-inl.h"
#include "worker/kernels/cpu/simd/gemm-inl.h"
#include "worker/kernels/cpu/simd/pack-inl.h"
#include "worker/kernels/cpu/simd/softmax-inl.h"
#include "worker/kernels/cpu/simd/tile_ops.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

struct Float32Word {
  static HWY_INLINE FloatVec MulAdd(FloatTag, FloatVec left, FloatVec right, FloatVec sum) {
    return hn::MulAdd(left, right, sum);
  }
};

struct StoreFloat32 {
  template <class D, class V>
  static HWY_INLINE void One(D d, V value, float* words, int col) {
    hn::StoreU(value, d, words + col);
  }
  template <class D, class V>
  static HWY_INLINE void Two(D d, V first, V second, float* words, int col) {
    hn::StoreU(first, d, words + col);
    hn::StoreU(second, d, words + col + hn::Lanes(d));
  }
};

template <typename T>
void PackLeftFrom(const SourceRows& source, bool negate, float* target, int64_t target_stride) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const FloatVec sign = negate ? hn::Set(d, -0.0f) : hn::Zero(d);
  for (int r = 0; r < source.rows; ++r) {
    const T* in = static_cast<const T*>(source.data) + source.RowOffset(r);
    float* out = target + r * target_stride;
    int col = 0;
    for (; col + lanes <= source.cols; col += lanes) {
      hn::StoreU(hn::Xor(LoadAsFloat(d, in + col), sign), d, out + col);
    }
    if (col < source.cols) {
      alignas(64) float rest[hn::MaxLanes(d)];
      hn::Store(hn::Xor(LoadFirstAsFloat(d, in + col, source.cols - col), sign), d, rest);
      std::memcpy(out + col, rest, sizeof(float) * (source.cols - col));
    }
  }
}

void PackLeft(const SourceRows& source, bool negate, float* target, int64_t target_stride) {
  switch (source.dtype) {
    case DType::kFloat32:
      return PackLeftFrom<float>(source, negate, target, target_stride);
    case DType::kBFloat16:
      return PackLeftFrom<hwy::bfloat16_t>(source, negate, target, target_stride);
    case DType::kFloat16:
      return PackLeftFrom<hwy::float16_t>(source, negate, target, target_stride);
  }
}

void PackRightTransposed(const SourceRows& source, float* target, float* scratch) {
  const int panel = kVectors * static_cast<int>(hn::Lanes(FloatTag()));
  if (source.dtype == DType::kFloat32) {
    TransposeRows(static_cast<const char*>(source.data), source.row_stride * 4, source.rows,
                  source.cols * 4, panel, target);
    return;
  }
  PackLeft(source, false, scratch, source.cols);
  TransposeRows(reinterpret_cast<const char*>(scratch), int64_t{source.cols} * 4, source.rows,
                source.cols * 4, panel, target);
}

template <typename T>
bool PackRightFrom(const SourceRows& source, float* target) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int panel = kVectors * lanes;
  const int cols = (source.cols + lanes - 1) / lanes * lanes;
  FloatVec poison = hn::Zero(d);  // becomes NaN with the first value that is not finite
  for (int begin = 0; begin < cols; begin += panel) {
    const int pitch = std::min(panel, cols - begin);
    for (int r = 0; r < source.rows; ++r) {
      const T* in = static_cast<const T*>(source.data) + source.RowOffset(r) + begin;
      float* out = target + int64_t{begin} * source.rows + int64_t{r} * pitch;
      for (int col = 0; col < pitch; col += lanes) {
        const int left = source.cols - begin - col;
        const FloatVec v =
            left >= lanes ? LoadAsFloat(d, in + col) : LoadFirstAsFloat(d, in + col, left);
        poison = hn::MulAdd(v, hn::Zero(d), poison);
        hn::StoreU(v, d, out + col);
      }
    }
  }
  return !hn::AllTrue(d, hn::Eq(poison, poison));
}

bool PackRight(const SourceRows& source, float* target) {
  switch (source.dtype) {
    case DType::kFloat32:
      return PackRightFrom<float>(source, target);
    case DType::kBFloat16:
      return PackRightFrom<hwy::bfloat16_t>(source, target);
    case DType::kFloat16:
      return PackRightFrom<hwy::float16_t>(source, target);
  }
  return false;
}

template <bool kTerms>
void GradientRows(const GradientArgs& args) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int r = 0; r < args.rows; ++r) {
    const RowSpan span(args.col_begin, args.col_end, args.visible_begin[r], args.visible_end[r],
                       lanes);
    const bool wide = HasWideScores(args, r);
    float* p_row = args.p + r * args.stride;
    float* ds_row = args.ds + r * args.stride;
    for (int col = args.col_begin; col < args.col_end; col += lanes) {
      FloatVec p = hn::Zero(d);
      FloatVec ds = p;
      if (col >= span.first && col < span.last)
        GradientOf<kTerms>(d, args, span, wide, r, col, p, ds);
      hn::StoreU(p, d, p_row + col);
      hn::StoreU(ds, d, ds_row + col);
    }
  }
}

void Gradient(const GradientArgs& args) {
  if (args.terms) return GradientRows<true>(args);
  GradientRows<false>(args);
}

}  // namespace

const TileOps* GetTileOps() {
  static const TileOps ops = {
      hwy::TargetName(HWY_TARGET),
      1,
      static_cast<int>(hn::Lanes(FloatTag())),
      kVectors * static_cast<int>(hn::Lanes(FloatTag())),
      &PackLeft,
      &PackRightTransposed,
      &PackRight,
      &Gemm<Float32Word>,
      &Softmax<StoreFloat32>,
      &Gradient,
  };
  return &ops;
}

}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::worker::cpu {

HWY_EXPORT(GetTileOps);

const TileOps& Float32TileOps() { return *HWY_DYNAMIC_DISPATCH(GetTileOps)(); }

const TileOps& TileOpsFor(DType dtype) {
  if (dtype == DType::kBFloat16) {
    const TileOps* bf16 = Avx512Bf16TileOps();
    if (bf16 != nullptr) return *bf16;
  }
  return Float32TileOps();
}

}  // namespace ringattn::worker::cpu
#endif  // HWY_ONCE
