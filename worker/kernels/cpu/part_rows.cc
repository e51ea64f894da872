#include "worker/kernels/cpu/part_rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "common/attention/merge.h"
#include "worker/kernels/cpu/simd/elementwise.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Returns the index of a row in [outer, heads, rows] or [outer, rows, heads].
int64_t PlaceOf(bool heads_first, int64_t outer, int64_t rows, int64_t heads, int64_t row,
                int64_t head) {
  return heads_first ? (outer * heads + head) * rows + row : (outer * rows + row) * heads + head;
}

// A part's rows in the order of the whole's, from one of them on. A dilated problem has many runs
// and tasks of few rows: none looks through the runs before its own.
class RowCursor {
 public:
  RowCursor(absl::Span<const RowRun> runs, int64_t from) : runs_(runs) {
    const auto behind =
        std::upper_bound(runs.begin(), runs.end(), from,
                         [](int64_t row, const RowRun& run) { return row < run.begin; });
    if (behind != runs.begin()) run_ = static_cast<size_t>(behind - runs.begin()) - 1;
  }

  // The part's number of the whole's row, or -1. Rows ascend from call to call, from `from` on.
  int64_t Find(int64_t row) {
    while (run_ < runs_.size()) {
      const RowRun& run = runs_[run_];
      if (in_run_ >= run.count) {
        ++run_;
        in_run_ = 0;
        continue;
      }
      const int64_t behind = row - (run.begin + in_run_ * run.step);
      if (behind <= 0) return behind < 0 ? -1 : run.first + in_run_;
      in_run_ += behind <= run.step ? 1 : (behind + run.step - 1) / run.step;
    }
    return -1;
  }

 private:
  absl::Span<const RowRun> runs_;
  size_t run_ = 0;
  int64_t in_run_ = 0;
};

// Rows of one batch row, ascending from `first` on. Both ways to give a row its parts go from part
// to part, as a row has few.
class Scatter {
 public:
  Scatter(const ScatterCall& call, int64_t outer, int64_t first)
      : call_(call), outer_(outer), part_rows_(call.parts.size()) {
    for (const ScatterPart& part : call.parts) cursors_.emplace_back(part.row_runs, first);
    if (call_.merges) {
      merged_.resize(call.heads);
      row_.resize(call.width);
    } else if (call.final && call.dtype != DType::kFloat32) {
      row_.resize(call.heads * call.width);
    }
  }

  void Do(int64_t row) {
    bool any = false;
    for (size_t p = 0; p < cursors_.size(); ++p) {
      part_rows_[p] = cursors_[p].Find(row);
      any = any || part_rows_[p] >= 0;
    }
    if (!any && !call_.initial && !call_.final) return;
    if (call_.merges) {
      MergeRow(row);
    } else {
      AddRow(row);
    }
  }

 private:
  // body(head of the whole, the part's values there, their lse or null)
  template <typename Body>
  void ForEachTerm(const Body& body) const {
    for (size_t p = 0; p < cursors_.size(); ++p) {
      if (part_rows_[p] < 0) continue;
      const ScatterPart& part = call_.parts[p];
      const auto heads = static_cast<int64_t>(part.head_of.size());
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at =
            PlaceOf(call_.heads_first, outer_, part.rows, heads, part_rows_[p], h) * call_.width;
        const float* const lse = part.lse == nullptr ? nullptr
                                                     : part.lse + PlaceOf(true, outer_, part.rows,
                                                                          heads, part_rows_[p], h);
        body(part.head_of[h], part.values + at, lse);
      }
    }
  }

  int64_t Place(int64_t row, int64_t head) const {
    return PlaceOf(call_.heads_first, outer_, call_.rows, call_.heads, row, head) * call_.width;
  }

  void AddRow(int64_t row) {
    if (call_.heads_first) {
      ForEachTerm([&](int64_t head, const float* term, const float*) {
        AddScaled(1.0f, term, call_.values + Place(row, head), call_.width);
      });
      return;
    }
    const int64_t count = call_.heads * call_.width;
    const int64_t at = Place(row, 0);
    float* sums;  // `values` may be null where a call is the first and the last
    if (!call_.final) {
      sums = call_.values + at;
    } else {
      sums = row_.empty() ? static_cast<float*>(call_.result) + at : row_.data();
    }
    if (call_.initial) {
      std::fill_n(sums, count, 0.0f);
    } else if (sums != call_.values + at) {
      std::copy_n(call_.values + at, count, sums);
    }
    ForEachTerm([&](int64_t head, const float* term, const float*) {
      AddScaled(1.0f, term, sums + head * call_.width, call_.width);
    });
    if (!row_.empty()) Convert(call_.dtype, sums, ResultAt(at), count);
  }

  // A head's values so far are nothing, the whole's, or a part's.
  void MergeRow(int64_t row) {
    std::fill(merged_.begin(), merged_.end(), 0);
    ForEachTerm([&](int64_t head, const float* term, const float* term_lse) {
      merged_[head] = 1;
      float& lse = LseOf(row, head);
      const int64_t at = Place(row, head);
      if (call_.initial) {
        return Store(at, head, *term_lse == kNegativeInfinity ? nullptr : term, *term_lse, lse);
      }
      float* const before = call_.values + at;
      const MergeWeights weights = MergeLse(lse, *term_lse);
      // A row that saw no key has value 0 and weight 0.
      if (weights.second == 0.0f) return Store(at, head, before, lse, lse);
      float* const target = call_.final ? row_.data() : before;
      Combine(weights.first, before, weights.second, term, target, call_.width);
      Store(at, head, target, weights.lse, lse);
    });
    if (!call_.initial && !call_.final) return;
    for (int64_t head = 0; head < call_.heads; ++head) {
      if (merged_[head] != 0) continue;
      float& lse = LseOf(row, head);
      const int64_t at = Place(row, head);
      if (call_.initial) {
        Store(at, head, nullptr, kNegativeInfinity, lse);
      } else {
        Store(at, head, call_.values + at, lse, lse);
      }
    }
  }

  float& LseOf(int64_t row, int64_t head) const {
    return call_.lse[PlaceOf(true, outer_, call_.rows, call_.heads, row, head)];
  }

  // Values and lse at their places, with the sink where it joins them. `values`: null for 0; what
  // stands there already, or in row_, too.
  void Store(int64_t at, int64_t head, const float* values, float lse, float& lse_target) {
    if (call_.final && call_.sinks != nullptr && call_.sinks[head] != kNegativeInfinity) {
      const MergeWeights joined = MergeLse(lse, call_.sinks[head]);
      lse = joined.lse;
      if (values != nullptr) {
        Scale(joined.first, values, row_.data(), call_.width);
        values = row_.data();
      }
    }
    lse_target = lse;
    if (!call_.final || call_.dtype == DType::kFloat32) {
      float* const target = (call_.final ? static_cast<float*>(call_.result) : call_.values) + at;
      if (values == nullptr) {
        std::fill_n(target, call_.width, 0.0f);
      } else if (values != target) {
        std::copy_n(values, call_.width, target);
      }
    } else if (values == nullptr) {
      std::memset(ResultAt(at), 0, call_.width * ElementBytes(call_.dtype));
    } else {
      Convert(call_.dtype, values, ResultAt(at), call_.width);
    }
  }

  void* ResultAt(int64_t at) const {
    return static_cast<char*>(call_.result) + at * ElementBytes(call_.dtype);
  }

  const ScatterCall& call_;
  const int64_t outer_;
  std::vector<RowCursor> cursors_;
  std::vector<int64_t> part_rows_;  // by part: its number of the row at hand, or -1
  std::vector<char> merged_;        // by head, of the row at hand
  std::vector<float> row_;          // what is still to be rounded
};

}  // namespace

void GatherRows(const GatherCall& call, int64_t begin, int64_t end) {
  const auto size = static_cast<size_t>(call.inner_bytes);
  const auto gather = [&](int64_t outer, int64_t row, int64_t part_row) {
    for (int64_t h = 0; h < call.part_heads; ++h) {
      const int64_t from =
          PlaceOf(call.heads_first, outer, call.rows, call.heads, row, call.head_of[h]);
      const int64_t to =
          PlaceOf(call.heads_first, outer, call.part_rows, call.part_heads, part_row, h);
      std::memcpy(static_cast<char*>(call.part) + to * call.inner_bytes,
                  static_cast<const char*>(call.whole) + from * call.inner_bytes, size);
    }
  };
  for (int64_t at = begin; at < end;) {
    const int64_t outer = at / call.part_rows;
    const int64_t part_row = at % call.part_rows;
    const auto run =
        std::upper_bound(call.row_runs.begin(), call.row_runs.end(), part_row,
                         [](int64_t row, const RowRun& other) { return row < other.first; }) -
        1;
    const int64_t in_run = part_row - run->first;
    const int64_t count = std::min({run->count - in_run, end - at, call.part_rows - part_row});
    for (int64_t i = 0; i < count; ++i) {
      gather(outer, run->begin + (in_run + i) * run->step, part_row + i);
    }
    at += count;
  }
}

void ScatterRows(const ScatterCall& call, int64_t begin, int64_t end) {
  assert(!call.heads_first || (!call.merges && !call.initial && !call.final));
  for (int64_t at = begin; at < end;) {
    const int64_t outer = at / call.rows;
    const int64_t row_end = std::min(call.rows, at % call.rows + end - at);
    Scatter scatter(call, outer, at % call.rows);
    for (int64_t row = at % call.rows; row < row_end; ++row, ++at) scatter.Do(row);
  }
}

}  // namespace ringattn::worker::cpu
