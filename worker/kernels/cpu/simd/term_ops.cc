#include "worker/kernels/cpu/simd/term_ops.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/kernels/cpu/simd/term_ops.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "worker/kernels/cpu/simd/convert-inl.h"
#include "worker/kernels/cpu/simd/math-inl.h"
#include "worker/kernels/cpu/simd/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ringattn::worker::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <typename T>
void LoadBiasFrom(const T* source, int count, float* target) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int col = 0;
  for (; col + lanes <= count; col += lanes) {
    hn::StoreU(LoadAsFloat(d, source + col), d, target + col);
  }
  if (col >= count) return;
  alignas(64) float rest[hn::MaxLanes(d)];
  hn::Store(LoadFirstAsFloat(d, source + col, count - col), d, rest);
  std::memcpy(target + col, rest, sizeof(float) * (count - col));
}

void LoadBiasHere(DType dtype, const void* source, int count, float* target) {
  switch (dtype) {
    case DType::kFloat32:
      return LoadBiasFrom(static_cast<const float*>(source), count, target);
    case DType::kBFloat16:
      return LoadBiasFrom(static_cast<const hwy::bfloat16_t*>(source), count, target);
    case DType::kFloat16:
      return LoadBiasFrom(static_cast<const hwy::float16_t*>(source), count, target);
  }
}

// REQUIRES: every distance fits int32.
void SubtractDistanceHere(float slope, int64_t distance, int count, float* target) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto step = hn::Set(di, lanes);
  const auto minus_slope = hn::Set(d, -slope);
  // Counted on: compilers build an Iota of every column lane by lane, through memory.
  auto from = hn::Sub(hn::Set(di, static_cast<int32_t>(distance)), hn::Iota(di, 0));
  int col = 0;
  for (; col + lanes <= count; col += lanes) {
    const auto away = hn::ConvertTo(d, hn::Abs(from));
    hn::StoreU(hn::MulAdd(away, minus_slope, hn::LoadU(d, target + col)), d, target + col);
    from = hn::Sub(from, step);
  }
  for (; col < count; ++col) {
    target[col] = std::fma(-slope, static_cast<float>(std::abs(distance - col)), target[col]);
  }
}

void MaskByBytesHere(const uint8_t* mask, int count, float* target) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  const hn::Rebind<uint8_t, Floats> bytes;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto hidden = hn::Set(d, kMinusInfinity);
  int col = 0;
  for (; col + lanes <= count; col += lanes) {
    const auto seen = hn::PromoteTo(di, hn::LoadU(bytes, mask + col));
    const auto is_hidden = hn::RebindMask(d, hn::Eq(seen, hn::Zero(di)));
    hn::StoreU(hn::IfThenElse(is_hidden, hidden, hn::LoadU(d, target + col)), d, target + col);
  }
  for (; col < count; ++col) target[col] = mask[col] != 0 ? target[col] : kMinusInfinity;
}

// Reads the bytes that hold the bits and no others.
void MaskByBitsHere(const uint8_t* mask, int64_t first, int count, float* target) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto hidden = hn::Set(d, kMinusInfinity);
  const int64_t end_byte = (first + count + 7) / 8;
  int col = 0;
  for (; col + lanes <= count; col += lanes) {
    const int64_t byte = (first + col) / 8;
    uint64_t bits = 0;
    if (byte + 8 <= end_byte) {
      std::memcpy(&bits, mask + byte, sizeof(bits));
    } else {
      for (int64_t b = byte; b < end_byte; ++b) bits |= uint64_t{mask[b]} << (8 * (b - byte));
    }
    bits >>= (first + col) % 8;
    const auto seen = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
    hn::StoreU(hn::IfThenElse(seen, hn::LoadU(d, target + col), hidden), d, target + col);
  }
  for (; col < count; ++col) {
    const int64_t bit = first + col;
    if ((mask[bit / 8] >> (bit % 8) & 1) == 0) target[col] = kMinusInfinity;
  }
}

void MaskByIdsHere(int32_t id, const int32_t* ids, int count, float* target) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto own = hn::Set(di, id);
  const auto hidden = hn::Set(d, kMinusInfinity);
  int col = 0;
  for (; col + lanes <= count; col += lanes) {
    const auto seen = hn::RebindMask(d, hn::Eq(hn::LoadU(di, ids + col), own));
    hn::StoreU(hn::IfThenElse(seen, hn::LoadU(d, target + col), hidden), d, target + col);
  }
  for (; col < count; ++col) target[col] = ids[col] == id ? target[col] : kMinusInfinity;
}

// REQUIRES: fp32 holds every distance, and the next vector's.
template <bool kCapped, bool kDistance>
void Finish(const FinishArgs& args) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto hidden = hn::Set(d, kMinusInfinity);
  const auto scale = hn::Set(d, kCapped ? args.scale / args.cap : args.scale);
  const auto inverse_cap = hn::Set(d, kCapped ? 1.0f / args.cap : 1.0f);
  const auto cap = hn::Set(d, args.cap);
  const auto minus_slope = hn::Set(d, -args.slope);
  const auto step = hn::Set(d, static_cast<float>(lanes));
  auto from = hn::Sub(hn::Set(d, static_cast<float>(args.distance)), hn::Iota(d, 0.0f));
  for (int col = 0; col < args.count; col += lanes) {
    auto score = hn::Mul(hn::LoadU(d, args.scores + col), scale);
    if (args.inside != nullptr) {
      score = hn::MulAdd(hn::LoadU(d, args.inside + col), inverse_cap, score);
    }
    if constexpr (kCapped) {
      const auto t = Tanh(d, score);
      if (args.slopes != nullptr) {
        hn::StoreU(hn::NegMulAdd(t, t, hn::Set(d, 1.0f)), d, args.slopes + col);
      }
      score = hn::Mul(t, cap);
    }
    if (args.add != nullptr) {
      const auto add = hn::LoadU(d, args.add + col);
      score = hn::IfThenElse(hn::Eq(add, hidden), hidden, hn::Add(score, add));
    }
    if constexpr (kDistance) {
      score = hn::MulAdd(hn::Abs(from), minus_slope, score);
      from = hn::Sub(from, step);
    }
    hn::StoreU(score, d, args.scores + col);
  }
}

template <bool kDistance>
void FinishWith(const FinishArgs& args) {
  if (args.cap > 0.0f) return Finish<true, kDistance>(args);
  Finish<false, kDistance>(args);
}

void FinishScoresHere(const FinishArgs& args) {
  if (args.slope != 0.0f) return FinishWith<true>(args);
  FinishWith<false>(args);
}

#if HWY_TARGET == HWY_SCALAR
void KeepWordsHere(const PhiloxRow& row, uint32_t first, uint32_t threshold, int count,
                   uint32_t* words) {
  for (int w = 0; w < count; ++w) words[w] = KeepWord(row, first + w, threshold);
}
#else
using Words = hn::ScalableTag<uint32_t>;
using WordVec = hn::Vec<Words>;

// Both halves of the products of all lanes with one factor.
HWY_INLINE void Multiply(Words d, WordVec a, WordVec factor, WordVec& low, WordVec& high) {
  const hn::Repartition<uint64_t, Words> wide;
  const auto even = hn::MulEven(a, factor);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, a))), factor);
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}

// A lane is a counter: four of them make a word.
void KeepWordsHere(const PhiloxRow& row, uint32_t first, uint32_t threshold, int count,
                   uint32_t* words) {
  const Words d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto multiplier0 = hn::Set(d, kPhiloxMultiplier0);
  const auto multiplier1 = hn::Set(d, kPhiloxMultiplier1);
  const hn::RebindToSigned<Words> di;
  const auto limit = hn::Set(di, static_cast<int32_t>(threshold));
  const auto low_half = hn::Set(d, 0xffff);
  alignas(64) uint32_t quarter_factors[hn::MaxLanes(Words())];
  for (int lane = 0; lane < lanes; ++lane) quarter_factors[lane] = 1u << (2 * (lane % 4));
  const auto quarter_factor = hn::Load(d, quarter_factors);
  for (int begin = 0; begin < 4 * count; begin += lanes) {
    auto x0 = hn::Add(hn::Iota(d, 0), hn::Set(d, 4 * first + static_cast<uint32_t>(begin)));
    auto x1 = hn::Set(d, row.row);
    auto x2 = hn::Set(d, row.head);
    auto x3 = hn::Set(d, row.batch);
    uint32_t key0 = row.key0, key1 = row.key1;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      WordVec low0, high0, low1, high1;
      Multiply(d, x0, multiplier0, low0, high0);
      Multiply(d, x2, multiplier1, low1, high1);
      x0 = hn::Xor(hn::Xor(high1, x1), hn::Set(d, key0));
      x2 = hn::Xor(hn::Xor(high0, x3), hn::Set(d, key1));
      x1 = low1;
      x3 = low0;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    auto bits = hn::Zero(d);
    uint32_t bit = 1;
    for (const auto& x : {x0, x1, x2, x3}) {
      const auto low = hn::BitCast(di, hn::And(x, low_half));
      const auto high = hn::BitCast(di, hn::ShiftRight<16>(x));
      bits =
          hn::Or(bits, hn::IfThenZeroElse(hn::RebindMask(d, hn::Lt(low, limit)), hn::Set(d, bit)));
      bits = hn::Or(
          bits, hn::IfThenZeroElse(hn::RebindMask(d, hn::Lt(high, limit)), hn::Set(d, bit << 1)));
      bit <<= 8;
    }
    alignas(64) uint32_t quarters[hn::MaxLanes(Words())];
    hn::Store(hn::Mul(bits, quarter_factor), d, quarters);
    for (int lane = 0; lane + 4 <= lanes && begin + lane < 4 * count; lane += 4) {
      words[(begin + lane) / 4] =
          quarters[lane] | quarters[lane + 1] | quarters[lane + 2] | quarters[lane + 3];
    }
  }
}
#endif

void ExpandKeepBitsHere(const uint32_t* words, int first, float scale, int count, float* target) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto kept = hn::Set(d, scale);
  const auto bits_from = [&](int bit) {
    return (words[bit / 32] | uint64_t{words[bit / 32 + 1]} << 32) >> (bit % 32);
  };
  int col = 0;
  for (; col + lanes <= count; col += lanes) {
    const uint64_t bits = bits_from(first + col);
    const auto mask = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
    hn::StoreU(hn::IfThenElseZero(mask, kept), d, target + col);
  }
  for (; col < count; ++col) target[col] = (bits_from(first + col) & 1) != 0 ? scale : 0.0f;
}

void ScoreGradientsHere(const GradientArgs& args, float* ds) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int r = 0; r < args.rows; ++r) {
    const RowSpan span(args.col_begin, args.col_end, args.visible_begin[r], args.visible_end[r],
                       lanes);
    const bool wide = HasWideScores(args, r);
    for (int col = span.first; col < span.last; col += lanes) {
      auto p = hn::Zero(d), gradient = hn::Zero(d);
      GradientOf<true>(d, args, span, wide, r, col, p, gradient);
      hn::StoreU(gradient, d, ds + r * args.stride + col);
    }
  }
}

}  // namespace
}  // namespace ringattn::worker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::worker::cpu {

HWY_EXPORT(LoadBiasHere);
HWY_EXPORT(SubtractDistanceHere);
HWY_EXPORT(MaskByBytesHere);
HWY_EXPORT(MaskByBitsHere);
HWY_EXPORT(MaskByIdsHere);
HWY_EXPORT(FinishScoresHere);
HWY_EXPORT(KeepWordsHere);
HWY_EXPORT(ExpandKeepBitsHere);
HWY_EXPORT(ScoreGradientsHere);

void LoadBias(DType dtype, const void* source, int count, float* target) {
  HWY_DYNAMIC_DISPATCH(LoadBiasHere)(dtype, source, count, target);
}

void SubtractDistance(float slope, int64_t distance, int count, float* target) {
  constexpr int64_t kFar = std::numeric_limits<int32_t>::max();
  if (std::abs(distance) <= kFar && std::abs(distance - count) <= kFar) {
    return HWY_DYNAMIC_DISPATCH(SubtractDistanceHere)(slope, distance, count, target);
  }
  for (int col = 0; col < count; ++col) {
    target[col] -= slope * static_cast<float>(std::abs(distance - col));
  }
}

void MaskByBytes(const uint8_t* mask, int count, float* target) {
  HWY_DYNAMIC_DISPATCH(MaskByBytesHere)(mask, count, target);
}

void MaskByBits(const uint8_t* mask, int64_t first, int count, float* target) {
  HWY_DYNAMIC_DISPATCH(MaskByBitsHere)(mask, first, count, target);
}

void MaskByIds(int32_t id, const int32_t* ids, int count, float* target) {
  if (id < 0) {
    for (int col = 0; col < count; ++col) target[col] = -std::numeric_limits<float>::infinity();
    return;
  }
  HWY_DYNAMIC_DISPATCH(MaskByIdsHere)(id, ids, count, target);
}

void FinishScores(const FinishArgs& args) {
  // How far fp32 counts without rounding, less a vector that the count runs ahead.
  constexpr int64_t kCountable = (int64_t{1} << 24) - 64;
  if (args.slope == 0.0f || (std::abs(args.distance) <= kCountable &&
                             std::abs(args.distance - args.count) <= kCountable)) {
    return HWY_DYNAMIC_DISPATCH(FinishScoresHere)(args);
  }
  FinishArgs without = args;
  without.slope = 0.0f;
  HWY_DYNAMIC_DISPATCH(FinishScoresHere)(without);
  SubtractDistance(args.slope, args.distance, args.count, args.scores);
}

void KeepWords(const PhiloxRow& row, uint32_t first, uint32_t threshold, int count,
               uint32_t* words) {
  HWY_DYNAMIC_DISPATCH(KeepWordsHere)(row, first, threshold, count, words);
}

void ExpandKeepBits(const uint32_t* words, int first, float scale, int count, float* target) {
  HWY_DYNAMIC_DISPATCH(ExpandKeepBitsHere)(words, first, scale, count, target);
}

void ScoreGradients(const GradientArgs& args, float* ds) {
  HWY_DYNAMIC_DISPATCH(ScoreGradientsHere)(args, ds);
}

}  // namespace ringattn::worker::cpu
#endif  // HWY_ONCE
