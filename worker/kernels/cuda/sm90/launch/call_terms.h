// The score terms of one sm_90a call on the host: their tables behind the plan's, and the scratch
// memory that the launches of terms_classes.h fill.
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

// Whether the kernels with terms can compute a problem that has some, as far as they differ from
// the plain ones: head_dim and head_dim_v up to 128; a backward without a softcap.
bool ServesTerms(const AttentionProblem& problem, bool backward);

// Which of its head-dim class's kernels with terms a problem is for: that of ALiBi, segment ids and
// masks, that of dropout as well, or that of everything.
enum class TermKind { kPairs, kDrops, kAll };
TermKind TermKindOf(const AttentionProblem& problem);

// Whether a forward's ALiBi can be a part of its product (terms_forward_alibi.cuh): beside segment
// ids and masks at most, and with slopes that stay far from fp32's ends when they are divided by
// the scale.
bool AlibiInProduct(const AttentionProblem& problem);

// The keys of its dropout's rounds.
PhiloxKeys PhiloxKeysOf(const AttentionProblem& problem);

// Of each of a plan's ranges its first pair of tiles (terms_params.h), and behind the last range
// the number of pairs; `step` rows of a range make one pair. The numbers may exceed int32.
template <typename Range>
std::vector<int64_t> PairBegins(const std::vector<Range>& ranges, int32_t step) {
  std::vector<int64_t> begins = {0};
  for (const Range& range : ranges) {
    begins.push_back(begins.back() + (range.row_count + step - 1) / step);
  }
  return begins;
}

// The step between positions of a call for which OneStride holds (span_maps.h).
int32_t StrideOf(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks);

// A value; without Init that of a call without terms. Thread-safe for readers.
class CallTerms {
 public:
  // `step` as above; `rows`: of the scores' accumulators in a tile; `mask_heads`: planes that a
  // batch row has in a mask with heads of its own. RESOURCE_EXHAUSTED for more pairs than tables
  // can count.
  template <typename Call, typename Plan>
  absl::Status Init(const Call& call, const Plan& plan, int32_t rows, int32_t step,
                    int64_t mask_heads) {
    return Init(*call.problem, TermsOf(*call.problem, call.terms, call.q_rows),
                TermRangesOf(call, plan), PairBegins(plan.ranges, step), rows * step, mask_heads);
  }

  bool any() const { return any_; }
  int64_t table_bytes() const { return table_bytes_; }      // multiples of 256
  int64_t scratch_bytes() const { return scratch_bytes_; }  // likewise

  // `tables` and `scratch` are where this call's lie, 256-byte aligned.
  void WriteTables(void* tables) const;
  void DropTables();
  void Place(const void* tables, void* scratch, TermParams& terms, PairTables& pairs) const;

 private:
  absl::Status Init(const AttentionProblem& problem, const TermParams& params,
                    std::vector<TermRange> ranges, const std::vector<int64_t>& begins,
                    int32_t pair_size, int64_t mask_heads);

  bool any_ = false;
  TermParams params_;  // tables unset
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
