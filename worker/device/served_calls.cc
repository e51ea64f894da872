#include "worker/device/served_calls.h"

#include <algorithm>
#include <utility>

namespace ringattn::worker {
namespace {

using FamilyOf = absl::FunctionRef<std::string(const ChosenBy&)>;

constexpr int64_t kUsualHeadDim = 128;
// Tensor cores and copy engines read 16 bytes at a time, so families distinguish multiples of this.
constexpr int64_t kMultiple = 8;

// A range of head dims that one family serves.
struct HeadDimRange {
  std::string family;
  int64_t min = 0;
  int64_t max = 0;
  int64_t multiple = 1;

  bool operator==(const HeadDimRange&) const = default;
};

// Returns the ranges of the multiples, or of the other head dims, in ascending order.
std::vector<HeadDimRange> RangesOf(FamilyOf family_of, ChosenBy by, bool of_multiples) {
  std::vector<HeadDimRange> ranges;
  bool open = false;
  for (int64_t head_dim = 1; head_dim <= kMaxHeadDim; ++head_dim) {
    const bool is_multiple = head_dim % kMultiple == 0;
    // A multiple that follows another head dim is part of the same range.
    if (!of_multiples && is_multiple && open) ranges.back().max = head_dim;
    if (is_multiple != of_multiples) continue;
    by.head_dim = head_dim;
    std::string family = family_of(by);
    if (family.empty()) {
      open = false;
    } else if (open && ranges.back().family == family) {
      ranges.back().max = head_dim;
    } else {
      ranges.push_back({std::move(family), head_dim, head_dim, of_multiples ? kMultiple : 1});
      open = true;
    }
  }
  return ranges;
}

// Returns the ranges of all head dims. Multiples form separate ranges only where another family
// serves them.
std::vector<HeadDimRange> RangesOf(FamilyOf family_of, const ChosenBy& by) {
  std::vector<HeadDimRange> ranges = RangesOf(family_of, by, /*of_multiples=*/false);
  const size_t others = ranges.size();
  for (HeadDimRange& range : RangesOf(family_of, by, /*of_multiples=*/true)) {
    const bool is_in_another = std::any_of(
        ranges.begin(), ranges.begin() + static_cast<int64_t>(others),
        [&range](const HeadDimRange& other) {
          return other.family == range.family && other.min <= range.min && range.max <= other.max;
        });
    if (!is_in_another) ranges.push_back(std::move(range));
  }
  return ranges;
}

// Returns the head dim to measure: the usual one, or the nearest that the range's family serves.
// For kernels with score terms or deterministic order, it prefers the first one beyond. Those
// kernels may be exact ones that compute 256 there, and with a rate that is too high, a working
// rank would appear lost.
int64_t HeadDimOf(FamilyOf family_of, const HeadDimRange& range, ChosenBy by) {
  const bool plain = !by.score_terms && !by.deterministic;
  const int64_t wanted = plain ? kUsualHeadDim : kUsualHeadDim + 1;
  for (int64_t distance = 0; distance <= kMaxHeadDim; ++distance) {
    for (const int64_t sign : {plain ? -1 : 1, plain ? 1 : -1}) {
      by.head_dim = wanted + sign * distance;
      if (by.head_dim < range.min || by.head_dim > range.max || by.head_dim % range.multiple != 0) {
        continue;
      }
      if (family_of(by) == range.family) return by.head_dim;
    }
  }
  return range.min;  // the family serves it, because the range begins there
}

void Add(FamilyOf family_of, const HeadDimRange& range, const ChosenBy& by, RequestKind kind,
         std::vector<ServedCalls>& all) {
  kind.min_head_dim = range.min;
  kind.max_head_dim = range.max;
  kind.head_dim_multiple = range.multiple;
  for (ServedCalls& each : all) {
    if (each.family != range.family || each.backward != by.backward || !(each.kind == kind))
      continue;
    each.dtypes.push_back(by.dtype);
    return;
  }
  all.push_back({range.family, {by.dtype}, by.backward, kind, HeadDimOf(family_of, range, by)});
}

void AddKinds(FamilyOf family_of, ChosenBy by, std::vector<ServedCalls>& all) {
  RequestKind kind;
  kind.score_terms = by.score_terms;
  if (by.backward) kind.deterministic = by.deterministic;
  by.softcap = false;
  const std::vector<HeadDimRange> plain = RangesOf(family_of, by);
  by.softcap = true;
  const std::vector<HeadDimRange> capped = RangesOf(family_of, by);
  if (plain != capped) kind.softcap = false;
  by.softcap = false;
  for (const HeadDimRange& range : plain) Add(family_of, range, by, kind, all);
  if (plain == capped) return;
  kind.softcap = by.softcap = true;
  for (const HeadDimRange& range : capped) Add(family_of, range, by, kind, all);
}

}  // namespace

std::vector<ServedCalls> ServedCallsBy(FamilyOf family_of) {
  std::vector<ServedCalls> all;
  for (const bool score_terms : {false, true}) {
    for (const bool backward : {false, true}) {
      for (const bool deterministic : {false, true}) {
        if (deterministic && !backward) continue;  // every forward is deterministic
        for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
          AddKinds(family_of,
                   {.dtype = dtype,
                    .backward = backward,
                    .score_terms = score_terms,
                    .deterministic = deterministic},
                   all);
        }
      }
    }
  }
  return all;
}

}  // namespace ringattn::worker
