#include "worker/kernels/cuda/sm90/launch/call_terms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/tables.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int64_t kWidestClass = 128;
// Bounds of a slope divided by the scale. Within them three bf16 numbers represent it, and its
// product with a stride is finite.
constexpr float kLeastSlope = 0x1p-60f, kMostSlope = 0x1p60f;

}  // namespace

bool ServesTerms(const AttentionProblem& problem, bool backward) {
  return std::max(problem.head_dim, problem.head_dim_v) <= kWidestClass &&
         !(backward && problem.softcap > 0);
}

TermKind TermKindOf(const AttentionProblem& problem) {
  if (problem.terms.bias.has_value()) return TermKind::kAll;
  return problem.terms.dropout.threshold != 0 ? TermKind::kDrops : TermKind::kPairs;
}

bool AlibiInProduct(const AttentionProblem& problem) {
  const std::vector<float>& slopes = problem.terms.alibi_slopes;
  if (slopes.empty() || TermKindOf(problem) != TermKind::kPairs || problem.softcap > 0 ||
      !(problem.softmax_scale > 0)) {
    return false;
  }
  return std::all_of(slopes.begin(), slopes.end(), [&problem](float slope) {
    const float size = std::abs(slope / problem.softmax_scale);
    return size == 0 || (size >= kLeastSlope && size <= kMostSlope);
  });
}

PhiloxKeys PhiloxKeysOf(const AttentionProblem& problem) {
  const uint64_t seed = problem.terms.dropout.seed;
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

int32_t StrideOf(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks) {
  for (const Piece& piece : q_pieces) {
    if (piece.length > 0) return static_cast<int32_t>(piece.stride);
  }
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) {
      if (piece.length > 0) return static_cast<int32_t>(piece.stride);
    }
  }
  return 1;
}

absl::Status CallTerms::Init(const AttentionProblem& problem, const TermParams& params,
                             std::vector<TermRange> ranges, const std::vector<int64_t>& begins,
                             int32_t pair_size, int64_t mask_heads) {
  any_ = true;
  const ScoreTerms& terms = problem.terms;
  const int64_t pairs = begins.back();
  const int64_t planes = !terms.mask.has_value() ? 0
                                                 : (terms.mask->per_batch ? problem.batch : 1) *
                                                       (terms.mask->per_head ? mask_heads : 1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (pairs > kMost || static_cast<int64_t>(ranges.size()) * std::max<int64_t>(planes, 1) > kMost) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "too many pairs of tiles or planes of a mask; pairs, and ranges times planes, may be at "
        "most 2147483647: ",
        pairs, " pairs, ", planes, " planes"));
  }
  params_ = params;
  ranges_ = std::move(ranges);
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    pair_begins_.push_back(static_cast<int32_t>(begins[i]));
  }
  slopes_ = terms.alibi_slopes;
  has_slopes_ = !slopes_.empty();
  pairs_ = static_cast<int32_t>(pairs);
  mask_planes_ = static_cast<int32_t>(planes);
  pair_begins_offset_ = TableBytes(ranges_);
  slopes_offset_ = pair_begins_offset_ + TableBytes(pair_begins_);
  table_bytes_ = slopes_offset_ + TableBytes(slopes_);
  mask_classes_offset_ = terms.segment_ids ? AlignUp(problem.batch * pairs) : 0;
  mask_words_offset_ = mask_classes_offset_ + AlignUp(planes * pairs);
  scratch_bytes_ = mask_words_offset_ + AlignUp(planes * pairs * (pair_size / 8));
  return absl::OkStatus();
}

void CallTerms::WriteTables(void* tables) const {
  WriteTable(ranges_, tables, 0);
  WriteTable(pair_begins_, tables, pair_begins_offset_);
  WriteTable(slopes_, tables, slopes_offset_);
}

void CallTerms::DropTables() {
  ranges_ = {};
  pair_begins_ = {};
  slopes_ = {};
}

void CallTerms::Place(const void* tables, void* scratch, TermParams& terms,
                      PairTables& pairs) const {
  terms = params_;
  terms.ranges = TableAt<TermRange>(tables, 0);
  terms.slopes = has_slopes_ ? TableAt<float>(tables, slopes_offset_) : nullptr;
  pairs = {};
  pairs.pair_begin = TableAt<int32_t>(tables, pair_begins_offset_);
  pairs.pairs = pairs_;
  uint8_t* const bytes = static_cast<uint8_t*>(scratch);
  if (terms.q_segment_ids != nullptr) pairs.id_classes = bytes;
  if (mask_planes_ == 0) return;
  pairs.mask_planes = mask_planes_;
  pairs.mask_classes = bytes + mask_classes_offset_;
  pairs.mask_words = bytes + mask_words_offset_;
}

}  // namespace ringattn::worker::cuda::sm90
