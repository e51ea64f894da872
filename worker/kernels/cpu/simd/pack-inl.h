// Packs operands as whole words of any content. Included once per SIMD target.
#if defined(RINGATTN_WORKER_KERNELS_CPU_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_WORKER_KERNELS_CPU_SIMD_PACK_INL_H_
#undef RINGATTN_WORKER_KERNELS_CPU_SIMD_PACK_INL_H_
#else
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_PACK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR
// Block b (128 bits) of the result holds the four words of row 4 * b + `row`.
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const char* rows, int64_t stride, int row) {
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  if constexpr (kLanes > 4) {
    const hn::Half<D> dh;
    return hn::Combine(d, LoadBlocks(dh, rows, stride, row + kLanes / 2),
                       LoadBlocks(dh, rows, stride, row));
  } else {
    return hn::LoadU(d, reinterpret_cast<const float*>(rows + row * stride));
  }
}
#endif

// target[w * pitch + r] = word w of row r, for `lanes` rows and four words.
template <class D>
HWY_INLINE void TransposeFourWords(D d, const char* rows, int64_t stride, float* target,
                                   int pitch) {
#if HWY_TARGET == HWY_SCALAR
  for (int w = 0; w < 4; ++w) std::memcpy(target + w * pitch, rows + w * sizeof(float), 4);
#else
  const hn::Repartition<uint64_t, D> du64;
  const auto r0 = LoadBlocks(d, rows, stride, 0);
  const auto r1 = LoadBlocks(d, rows, stride, 1);
  const auto r2 = LoadBlocks(d, rows, stride, 2);
  const auto r3 = LoadBlocks(d, rows, stride, 3);
  const auto low01 = hn::BitCast(du64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(du64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(du64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(du64, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(du64, low01, low23)), d, target);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(du64, low01, low23)), d, target + pitch);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(du64, high01, high23)), d, target + 2 * pitch);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(du64, high01, high23)), d, target + 3 * pitch);
#endif
}

// Right operand with one column per source row: `row_bytes` bytes of each of
// `rows` rows, zero padded to whole words and to whole vectors of columns.
inline void TransposeRows(const char* source, int64_t stride_bytes, int rows, int row_bytes,
                          int panel, float* target) {
  const hn::ScalableTag<float> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int whole_words = row_bytes / 4;
  const int depth = (row_bytes + 3) / 4;
  const int cols = (rows + lanes - 1) / lanes * lanes;
  for (int col = 0; col < cols; col += lanes) {
    const int panel_begin = col / panel * panel;
    const int pitch = std::min(panel, cols - panel_begin);
    float* out = target + int64_t{panel_begin} * depth + (col - panel_begin);
    const char* in = source + col * stride_bytes;
    int word = 0;
    if (col + lanes <= rows) {
      for (; word + 4 <= whole_words; word += 4) {
        TransposeFourWords(d, in + word * 4, stride_bytes, out + int64_t{word} * pitch, pitch);
      }
    }
    for (; word < depth; ++word) {
      const int bytes = std::min(4, row_bytes - word * 4);
      for (int r = 0; r < lanes; ++r) {
        float value = 0.0f;
        if (col + r < rows) std::memcpy(&value, in + r * stride_bytes + word * 4, bytes);
        out[int64_t{word} * pitch + r] = value;
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
