// The score terms of one sm_90a call on the host: their tables, placed after the plan's, and the
// scratch memory that the launches of terms_classes.h fill.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_TERMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_TERMS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/term_table.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// Returns whether the kernels with terms can compute a problem with score terms, beyond the
// conditions of the plain kernels: head_dim and head_dim_v up to 128, and no softcap in a backward.
bool ServesTerms(const AttentionProblem& problem, bool backward);

// The kernels with terms in a head-dim class: for ALiBi, segment ids and masks; for dropout in
// addition; for all terms.
enum class TermKind { kPairs, kDrops, kAll };
TermKind TermKindOf(const AttentionProblem& problem);

// Returns whether a forward's ALiBi can be computed by its matrix product
// (terms_forward_alibi.cuh). The other terms must be segment ids and masks at most, and the slopes
// divided by the scale must stay far from the limits of fp32.
bool AlibiInProduct(const AttentionProblem& problem);

// The Philox keys of the problem's dropout.
PhiloxKeys PhiloxKeysOf(const AttentionProblem& problem);

// Returns for each range of a plan the index of its first pair of tiles (terms_params.h), followed
// by the number of pairs. `step` rows of a range form one pair. The numbers may exceed int32.
template <typename Range>
std::vector<int64_t> PairBegins(const std::vector<Range>& ranges, int32_t step) {
  std::vector<int64_t> begins = {0};
  for (const Range& range : ranges) {
    begins.push_back(begins.back() + (range.row_count + step - 1) / step);
  }
  return begins;
}

// Returns the step between positions of a call for which OneStride holds (span_maps.h).
int32_t StrideOf(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks);

// A value type. Without Init it represents a call without terms. Const methods may run
// concurrently.
class CallTerms {
 public:
  // `step`: as above. `rows`: rows of the scores' accumulators in a tile. `mask_heads`: planes per
  // batch row of a mask with one plane per head. Returns RESOURCE_EXHAUSTED for more pairs than the
  // tables can count.
  template <typename Call, typename Plan>
  absl::Status Init(const Call& call, const Plan& plan, int32_t rows, int32_t step,
                    int64_t mask_heads) {
    return Init(*call.problem, TermsOf(*call.problem, call.terms, call.q_rows),
                TermRangesOf(call, plan), PairBegins(plan.ranges, step), rows * step, mask_heads);
  }

  bool any() const { return any_; }
  int64_t table_bytes() const { return table_bytes_; }      // multiples of 256
  int64_t scratch_bytes() const { return scratch_bytes_; }  // multiples of 256

  // `tables` and `scratch` are the addresses of this call's tables and scratch memory, 256-byte
  // aligned.
  void WriteTables(void* tables) const;
  void DropTables();
  void Place(const void* tables, void* scratch, TermParams& terms, PairTables& pairs) const;

 private:
  absl::Status Init(const AttentionProblem& problem, const TermParams& params,
                    std::vector<TermRange> ranges, const std::vector<int64_t>& begins,
                    int32_t pair_size, int64_t mask_heads);

  bool any_ = false;
  TermParams params_;  // without tables
  std::vector<TermRange> ranges_;
  std::vector<int32_t> pair_begins_;
  std::vector<float> slopes_;
  bool has_slopes_ = false;
  int32_t pairs_ = 0;
  int32_t mask_planes_ = 0;
  int64_t pair_begins_offset_ = 0;  // in the tables, bytes
  int64_t slopes_offset_ = 0;
  int64_t table_bytes_ = 0;
  int64_t mask_classes_offset_ = 0;  // in the scratch memory, bytes
  int64_t mask_words_offset_ = 0;
  int64_t scratch_bytes_ = 0;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_TERMS_H_
