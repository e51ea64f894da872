#include "worker/kernels/cpu/part_rows.h"

#include <algorithm>
#include <cstring>

#include "common/attention/merge.h"
#include "worker/kernels/cpu/elementwise.h"

namespace ringattn::worker::cpu {
namespace {

// Where one row and head begins, in units of inner_bytes.
struct Place {
  int64_t whole = 0;
  int64_t part = 0;
};

class PartRow {
 public:
  PartRow(const PartCall& call, int64_t outer, int64_t row, int64_t part_row)
      : call_(call), outer_(outer), row_(row), part_row_(part_row) {}

  void Do() const {
    const int64_t floats = call_.inner_bytes / 4;
    for (int64_t h = 0; h < call_.part_heads; ++h) {
      const Place at = PlaceOf(h, call_.heads_first);
      char* const whole = static_cast<char*>(call_.whole) + at.whole * call_.inner_bytes;
      char* const part = static_cast<char*>(call_.part) + at.part * call_.inner_bytes;
      auto* const sum = reinterpret_cast<float*>(whole);
      const auto* const term = reinterpret_cast<const float*>(part);
      switch (call_.kind) {
        case PartCall::Kind::kGather:
          std::memcpy(part, whole, static_cast<size_t>(call_.inner_bytes));
          break;
        case PartCall::Kind::kAdd:
          AddScaled(1.0f, term, sum, floats);
          break;
        case PartCall::Kind::kMerge:
          Merge(h, sum, term, floats);
          break;
      }
    }
  }

 private:
  Place PlaceOf(int64_t h, bool heads_first) const {
    const int64_t head = call_.head_of[h];
    if (heads_first) {
      return {(outer_ * call_.heads + head) * call_.rows + row_,
              (outer_ * call_.part_heads + h) * call_.part_rows + part_row_};
    }
    return {(outer_ * call_.rows + row_) * call_.heads + head,
            (outer_ * call_.part_rows + part_row_) * call_.part_heads + h};
  }

  void Merge(int64_t h, float* sum, const float* term, int64_t floats) const {
    const Place at = PlaceOf(h, /*heads_first=*/true);
    const MergeWeights weights = MergeLse(call_.whole_lse[at.whole], call_.part_lse[at.part]);
    // What a row that saw no key has is 0, and of no weight.
    if (weights.second == 0.0f) return;
    Combine(weights.first, sum, weights.second, term, sum, floats);
    call_.whole_lse[at.whole] = weights.lse;
  }

  const PartCall& call_;
  const int64_t outer_;
  const int64_t row_;
  const int64_t part_row_;
};

}  // namespace

void DoPartRows(const PartCall& call, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end;) {
    const int64_t outer = at / call.part_rows;
    const int64_t part_row = at % call.part_rows;
    const auto run =
        std::upper_bound(call.row_runs.begin(), call.row_runs.end(), part_row,
                         [](int64_t row, const RowRun& other) { return row < other.first; }) -
        1;
    const int64_t in_run = part_row - run->first;
    const int64_t count = std::min(run->count - in_run, end - at);
    for (int64_t i = 0; i < count; ++i) {
      PartRow(call, outer, run->begin + (in_run + i) * run->step, part_row + i).Do();
    }
    at += count;
  }
}

}  // namespace ringattn::worker::cpu
