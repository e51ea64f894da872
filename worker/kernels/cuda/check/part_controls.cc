#include "worker/kernels/cuda/check/part_controls.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kOuter = 2, kRows = 200, kHeads = 7;

// A part by the definition: which rows and heads of the whole it has.
struct Lists {
  std::vector<RowRun> runs;
  std::vector<int32_t> heads;

  std::vector<int64_t> Rows() const {
    std::vector<int64_t> rows;
    for (const RowRun& run : runs) {
      for (int64_t i = 0; i < run.count; ++i) rows.push_back(run.begin + i * run.step);
    }
    return rows;
  }
};

const std::vector<RowRun> kRuns = {{3, 2, 40, 0}, {90, 3, 30, 40}};
const std::vector<RowRun> kOtherRuns = {{0, 1, 1, 0}, {1, 7, 9, 1}, {60, 1, 140, 10}};

int64_t Place(bool heads_first, int64_t o, int64_t rows, int64_t heads, int64_t row, int64_t head) {
  return heads_first ? (o * heads + head) * rows + row : (o * rows + row) * heads + head;
}

std::vector<float> Values(int64_t count, uint32_t seed) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>((i * 2654435761u + seed * 40503u) % 2001) / 1e3f - 1.0f);
  }
  return values;
}

bool Gathers(bool heads_first, int64_t inner) {
  const Lists part{kRuns, {1, 4, 4, 6}};
  const std::vector<int64_t> rows = part.Rows();
  GatherCall call;
  call.heads_first = heads_first;
  call.outer = kOuter;
  call.inner_bytes = inner * 4;
  call.rows = kRows;
  call.part_rows = static_cast<int64_t>(rows.size());
  call.heads = kHeads;
  call.part_heads = static_cast<int64_t>(part.heads.size());
  call.row_runs = part.runs;
  call.head_of = part.heads;
  const std::vector<float> values = Values(kOuter * kRows * kHeads * inner, 1);
  Buffer whole(values.size() * 4), gathered(kOuter * call.part_rows * call.part_heads * inner * 4);
  whole.Upload(values);
  call.whole = whole.get();
  call.part = gathered.get();
  LaunchAndWait(PrepareGather(call));
  const std::vector<float> found = gathered.Download<float>();
  bool passed = gathered.GuardsIntact();
  for (int64_t o = 0; o < kOuter; ++o) {
    for (int64_t r = 0; r < call.part_rows; ++r) {
      for (int64_t h = 0; h < call.part_heads; ++h) {
        const int64_t from = Place(heads_first, o, kRows, kHeads, rows[r], part.heads[h]) * inner;
        const int64_t to = Place(heads_first, o, call.part_rows, call.part_heads, r, h) * inner;
        for (int64_t i = 0; i < inner; ++i) passed = passed && found[to + i] == values[from + i];
      }
    }
  }
  return passed;
}

std::vector<float> Statistics(int64_t count, uint32_t seed) {
  std::vector<float> lse = Values(count, seed);
  for (int64_t i = 0; i < count; ++i) lse[i] = (i + seed) % 5 == 0 ? -INFINITY : 20 * lse[i];
  return lse;
}

// What a row of lse -inf has is 0.
void ZeroWhereNothing(const std::vector<float>& lse, int64_t rows, int64_t heads, int64_t width,
                      std::vector<float>& values) {
  for (int64_t o = 0; o < kOuter; ++o) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        if (lse[Place(true, o, rows, heads, r, h)] != -INFINITY) continue;
        for (int64_t i = 0; i < width; ++i) {
          values[Place(false, o, rows, heads, r, h) * width + i] = 0.0f;
        }
      }
    }
  }
}

struct Setting {
  bool merges;
  bool heads_first;
  bool initial;
  bool final;
  bool sinks;
  DType dtype;
  int64_t width;
};

// One row and head.
struct Expected {
  std::vector<double> values;
  double lse = -INFINITY;

  void Merge(const float* terms, double with) {
    const double max = std::fmax(lse, with);
    if (max == -INFINITY) return;
    const double first = std::exp(lse - max), second = std::exp(with - max);
    for (size_t i = 0; i < values.size(); ++i) {
      const double term = terms == nullptr ? 0.0 : terms[i];
      values[i] = (first * values[i] + second * term) / (first + second);
    }
    lse = max + std::log(first + second);
  }
};

bool Scatters(const Setting& setting) {
  // Heads of two parts at one row are others where they are merged.
  const std::vector<Lists> lists = {
      {kRuns, setting.merges ? std::vector<int32_t>{1, 4} : std::vector<int32_t>{1, 4, 4, 6}},
      {kOtherRuns, {0, 6}},
      {{}, {2}}};
  const int64_t width = setting.width, count = kOuter * kRows * kHeads;
  std::vector<float> before_lse = Statistics(count, 2), before = Values(count * width, 4);
  if (setting.merges) ZeroWhereNothing(before_lse, kRows, kHeads, width, before);
  const std::vector<float> sinks = Statistics(kHeads, 9);
  std::vector<Expected> expected(count);
  const auto at = [&](int64_t o, int64_t row, int64_t head) {
    return Place(setting.heads_first, o, kRows, kHeads, row, head);
  };
  for (int64_t i = 0; i < count; ++i) expected[i].values.assign(width, 0.0);
  for (int64_t o = 0; o < kOuter && !setting.initial; ++o) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t h = 0; h < kHeads; ++h) {
        Expected& one = expected[at(o, r, h)];
        for (int64_t i = 0; i < width; ++i) one.values[i] = before[at(o, r, h) * width + i];
        if (setting.merges) one.lse = before_lse[Place(true, o, kRows, kHeads, r, h)];
      }
    }
  }
  ScatterCall call;
  call.merges = setting.merges;
  call.heads_first = setting.heads_first;
  call.initial = setting.initial;
  call.final = setting.final;
  call.dtype = setting.dtype;
  call.outer = kOuter;
  call.rows = kRows;
  call.heads = kHeads;
  call.width = width;
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto upload = [&](const std::vector<float>& values) {
    buffers.push_back(std::make_unique<Buffer>(values.size() * 4));
    buffers.back()->Upload(values);
    return buffers.back()->get<float>();
  };
  for (size_t p = 0; p < lists.size(); ++p) {
    const std::vector<int64_t> rows = lists[p].Rows();
    const auto part_rows = static_cast<int64_t>(rows.size());
    const auto heads = static_cast<int64_t>(lists[p].heads.size());
    const int64_t part_count = kOuter * part_rows * heads;
    const std::vector<float> lse = Statistics(part_count, 3 + p);
    std::vector<float> values = Values(part_count * width, 5 + p);
    if (setting.merges) ZeroWhereNothing(lse, part_rows, heads, width, values);
    for (int64_t o = 0; o < kOuter; ++o) {
      for (int64_t r = 0; r < part_rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          Expected& one = expected[at(o, rows[r], lists[p].heads[h])];
          const float* const terms =
              values.data() + Place(setting.heads_first, o, part_rows, heads, r, h) * width;
          if (setting.merges) {
            one.Merge(terms, lse[Place(true, o, part_rows, heads, r, h)]);
          } else {
            for (int64_t i = 0; i < width; ++i) one.values[i] += terms[i];
          }
        }
      }
    }
    call.parts.push_back({part_rows, lists[p].runs, lists[p].heads, upload(values),
                          setting.merges ? upload(lse) : nullptr});
  }
  if (setting.sinks) {
    call.sinks = upload(sinks);
    for (int64_t i = 0; i < count; ++i) expected[i].Merge(nullptr, sinks[i % kHeads]);
  }
  const int64_t element_bytes = ElementBytes(setting.dtype);
  Buffer sums(count * width * 4), result(count * width * element_bytes), lses(count * 4);
  if (!setting.initial) sums.Upload(before), lses.Upload(before_lse);
  if (!(setting.initial && setting.final)) call.values = sums.get<float>();
  if (setting.final) call.result = result.get();
  if (setting.merges) call.lse = lses.get<float>();
  LaunchAndWait(PrepareScatter(call));

  std::vector<float> found(count * width);
  if (setting.final) {
    ConvertToFloat(setting.dtype, result.Download<char>().data(), found.data(), count * width);
  } else {
    found = sums.Download<float>();
  }
  const double bound = setting.final && setting.dtype != DType::kFloat32 ? 1.0 / 128 : 1e-5;
  bool passed = sums.GuardsIntact() && result.GuardsIntact() && lses.GuardsIntact();
  for (int64_t i = 0; i < count * width; ++i) {
    const double value = expected[i / width].values[i % width];
    passed = passed && std::fabs(found[i] - value) <= bound * std::fmax(1.0, std::fabs(value));
  }
  const std::vector<float> found_lse = lses.Download<float>();
  for (int64_t o = 0; o < kOuter && setting.merges; ++o) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const double value = expected[at(o, r, h)].lse;
        const float lse = found_lse[Place(true, o, kRows, kHeads, r, h)];
        passed = passed && (lse == value || std::fabs(lse - value) < 1e-4);
      }
    }
  }
  if (!passed) {
    std::printf("scatter: merges %d heads_first %d initial %d final %d sinks %d %s width %d\n",
                setting.merges, setting.heads_first, setting.initial, setting.final, setting.sinks,
                std::string(DTypeName(setting.dtype)).c_str(), static_cast<int>(width));
  }
  return passed;
}

}  // namespace

bool PartsAreParts() {
  bool passed = true;
  for (const bool heads_first : {false, true}) {
    for (const int64_t inner : {1, 3, 12}) passed = Gathers(heads_first, inner) && passed;
    for (const int64_t width : {1, 33, 300}) {
      if (width > 256 && !heads_first) continue;
      passed =
          Scatters({false, heads_first, false, false, false, DType::kFloat32, width}) && passed;
    }
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t width : {5, 64, 256}) {
      for (const bool merges : {false, true}) {
        for (const bool initial : {false, true}) {
          for (const bool final : {false, true}) {
            passed = Scatters({merges, false, initial, final, false, dtype, width}) && passed;
          }
          if (merges) {
            passed = Scatters({true, false, initial, true, true, dtype, width}) && passed;
          }
        }
      }
    }
  }
  return passed;
}

}  // namespace ringattn::worker::cuda::check
