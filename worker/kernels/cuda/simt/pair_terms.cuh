// The score terms of single pairs on the device: what they add to a score, which pairs they hide,
// and which pairs dropout keeps. docs/semantics.md defines them; worker/kernels/cpu/score_pass.h is
// the CPU's version.
//
// Scores are in natural units here. A hidden pair is omitted from every sum instead of getting a
// weight of 0, so that its rows of k, v, q and dout may hold any values.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_PAIR_TERMS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_PAIR_TERMS_CUH_

#include <cstdint>

#include "worker/kernels/cuda/plan/term_params.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"
#include "worker/kernels/philox.h"

namespace ringattn::worker::cuda::simt {

// Returns the row of a plane for a row of a tile or range, and the step between the elements of
// consecutive columns of the range in that row.
__device__ __forceinline__ int64_t PlaneRow(const TermParams& terms, const TermRange& range,
                                            const BandLimits& limits, int row) {
  return range.plane_row + (terms.by_keys ? limits.q_stride : 1) * row;
}
__device__ __forceinline__ int PlaneStride(const TermParams& terms, const BandLimits& limits) {
  return terms.by_keys ? 1 : static_cast<int>(limits.k_stride);
}

struct PairTerm {
  bool visible;
  float inside;  // added before the softcap
  float add;     // added after the softcap
};

// Finite if both are.
__device__ __forceinline__ float SaturatedSum(float a, float b) {
  const float sum = a + b;
  const bool finite = fabsf(a) <= kLargestFloat && fabsf(b) <= kLargestFloat;
  return finite && fabsf(sum) > kLargestFloat ? copysignf(kLargestFloat, sum) : sum;
}

// Returns a score's weight, given the row's lse, which is finite or NaN. The weight is at most 1 if
// the row is wide.
__device__ __forceinline__ float ProbabilityOf(float score, float lse) {
  float x = score - lse;
  if (IsWide(lse) && x > 0.0f) x = 0.0f;
  return exp2f(x * kLog2E);
}

struct FinishedScore {
  float score;
  float slope;  // d score / d (scale * q.k)

  __device__ __forceinline__ FinishedScore(float dot, const PairTerm& term,
                                           const CommonParams& common)
      : score(SaturatedSum(WideScore(dot, common.softmax_scale), term.inside)), slope(1.0f) {
    if (common.softcap > 0.0f) {
      const float tangent = tanhf(score / common.softcap);
      score = common.softcap * tangent;
      slope = Softcap::Derivative(tangent);
    }
    score = SaturatedSum(score, term.add);
  }

  __device__ __forceinline__ float Probability(float lse) const {
    return ProbabilityOf(score, lse);
  }
};

// A query row in one head, with the keys of one range.
class RowTerms {
 public:
  // `row`: in the range or tile that `range` describes. `local_row`: in the call's queries. `ids`:
  // of the range's column 0. Rows that do not exist see no key.
  __device__ __forceinline__ RowTerms(const TermParams& terms, const CommonParams& common,
                                      const TermRange& range, const BandLimits& limits, int row,
                                      int64_t batch, int head, int64_t local_row, bool exists,
                                      const int32_t* ids)
      : terms_(terms),
        k_position_(range.k_position),
        k_stride_(static_cast<int>(limits.k_stride)),
        plane_stride_(PlaneStride(terms, limits)),
        ids_(ids) {
    const int64_t position = range.q_position + limits.q_stride * row;
    const int64_t batch_row = terms.packed ? range.document : batch;
    aligned_ = position + range.shift;
    if (terms.slopes != nullptr) {
      slope_ = terms.slopes[(terms.slopes_per_batch ? batch_row * common.num_heads : 0) + head];
    }
    if (terms.q_segment_ids != nullptr && exists) {
      q_id_ = terms.q_segment_ids[batch * common.q_rows + local_row];
    }
    const int64_t row_of_plane = PlaneRow(terms, range, limits, row);
    const auto plane_row = [&](bool per_batch, bool per_head) {
      const int64_t plane =
          (per_batch ? batch : 0) * (per_head ? common.num_heads : 1) + (per_head ? head : 0);
      return plane * terms.plane_rows + row_of_plane;
    };
    bias_at_ =
        plane_row(terms.bias_per_batch, terms.bias_per_head) * terms.columns + range.plane_column;
    mask_at_ = plane_row(terms.mask_per_batch, terms.mask_per_head) * terms.mask_row_bytes +
               (terms.mask_bits ? 0 : range.plane_column);
    stream_ = {terms.key0, terms.key1, static_cast<uint32_t>(position + terms.first_query),
               terms.first_head + static_cast<uint32_t>(head) * terms.head_step,
               static_cast<uint32_t>(batch_row + terms.first_batch)};
  }

  // REQUIRES: the row exists, and the band makes the column visible to it.
  __device__ __forceinline__ PairTerm Of(int column) const {
    const int64_t key = KeyAt(column);
    const int64_t at = int64_t{plane_stride_} * column;
    PairTerm term{true, 0.0f, 0.0f};
    if (ids_ != nullptr && (q_id_ < 0 || ids_[column] != q_id_)) term.visible = false;
    if (term.visible && terms_.mask != nullptr) {
      const uint8_t* mask = terms_.mask + mask_at_;
      term.visible = terms_.mask_bits ? (mask[key / 8] >> (key % 8) & 1) != 0 : mask[at] != 0;
    }
    if (term.visible && terms_.bias != nullptr) {
      const float bias = BiasAt(bias_at_ + at);
      (terms_.bias_before_softcap ? term.inside : term.add) = bias;
      term.visible = bias != NegativeInfinity();
    }
    if (terms_.slopes != nullptr) {
      const int64_t distance = aligned_ > key ? aligned_ - key : key - aligned_;
      term.add -= slope_ * static_cast<float>(distance);
    }
    return term;
  }

  // Returns dropout's factor of the weight. Columns that are 8 apart share random bits if positions
  // are consecutive.
  __device__ __forceinline__ float Keep(int column) {
    if (terms_.threshold == 0) return 1.0f;
    const uint64_t key = static_cast<uint64_t>(KeyAt(column)) + terms_.first_key;
    const uint32_t counter = static_cast<uint32_t>(4 * (key / 32) + key / 2 % 4);
    if (!has_bits_ || counter != counter_) {
      bits_ =
          Philox({counter, stream_.row, stream_.head, stream_.batch}, stream_.key0, stream_.key1);
      counter_ = counter;
      has_bits_ = true;
    }
    const uint32_t part = key / 8 % 4;
    const uint32_t pair = part == 0   ? bits_.x0
                          : part == 1 ? bits_.x1
                          : part == 2 ? bits_.x2
                                      : bits_.x3;
    const uint32_t lane = key % 2 == 0 ? pair & 0xffff : pair >> 16;
    return lane >= terms_.threshold ? terms_.keep_scale : 0.0f;
  }

  __device__ __forceinline__ int64_t KeyAt(int column) const {
    return k_position_ + int64_t{k_stride_} * column;
  }

 private:
  __device__ __forceinline__ float BiasAt(int64_t at) const {
    switch (terms_.bias_dtype) {
      case DType::kBFloat16:
        return ToFloat(static_cast<const __nv_bfloat16*>(terms_.bias)[at]);
      case DType::kFloat16:
        return ToFloat(static_cast<const __half*>(terms_.bias)[at]);
      default:
        return static_cast<const float*>(terms_.bias)[at];
    }
  }

  const TermParams& terms_;
  const int64_t k_position_;
  const int k_stride_;
  const int plane_stride_;
  const int32_t* const ids_;
  int64_t aligned_;
  int64_t bias_at_;  // of column 0
  int64_t mask_at_;  // of column 0; of the row if the mask has bits
  float slope_ = 0.0f;
  int32_t q_id_ = -1;
  PhiloxRow stream_;
  PhiloxBlock bits_{};
  uint32_t counter_ = 0;
  bool has_bits_ = false;
};

// Loads rows of a tensor of any element type into a RowTile; offset(r) is the offset of row r, in
// elements.
template <typename Tile, typename Offset>
__device__ __forceinline__ void LoadRows(float* tile, DType dtype, const void* source,
                                         int valid_rows, int columns, const Offset& offset) {
  switch (dtype) {
    case DType::kBFloat16:
      return Tile::Load(tile, valid_rows, columns, [&](int r) {
        return static_cast<const __nv_bfloat16*>(source) + offset(r);
      });
    case DType::kFloat16:
      return Tile::Load(tile, valid_rows, columns,
                        [&](int r) { return static_cast<const __half*>(source) + offset(r); });
    default:
      return Tile::Load(tile, valid_rows, columns,
                        [&](int r) { return static_cast<const float*>(source) + offset(r); });
  }
}

// Returns whether to end before tile `round`: the same answer for every thread of the block, all of
// which call it. Reads the word only every few tiles, because the read is waited for.
__device__ __forceinline__ bool BlockStopped(const uint32_t* stop_word, int round) {
  return round % 8 == 0 && __syncthreads_or(threadIdx.x == 0 && Stopped(stop_word));
}

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_PAIR_TERMS_CUH_
