#include "worker/kernels/cuda/check/part_controls.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kOuter = 2, kHeads = 7;
// Rows of the whole: with a few runs in a part, and with as many runs as a part has rows, which
// exceed a block's shared memory.
constexpr int64_t kFewRows = 200, kManyRows = 6000;
constexpr int64_t kPartsOfOneHead = 40;

// A part by its definition: the rows and heads of the whole that it has.
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

// Returns one run for each step-th row.
std::vector<RowRun> SingleRows(int64_t rows, int64_t step) {
  std::vector<RowRun> runs;
  for (int64_t row = 0; row < rows; row += step) runs.push_back({row, 1, 1, row / step});
  return runs;
}

std::vector<RowRun> RunsOf(int64_t rows) {
  if (rows != kFewRows) return SingleRows(rows, 2);
  return {{3, 2, 40, 0}, {90, 3, 30, 40}};
}
std::vector<RowRun> OtherRunsOf(int64_t rows) {
  if (rows != kFewRows) return SingleRows(rows, 3);
  return {{0, 1, 1, 0}, {1, 7, 9, 1}, {60, 1, 140, 10}};
}

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

// `inner`: bytes.
bool Gathers(bool heads_first, int64_t rows, int64_t inner) {
  const Lists part{RunsOf(rows), {1, 4, 4, 6}};
  const std::vector<int64_t> row_of = part.Rows();
  GatherCall call;
  call.heads_first = heads_first;
  call.outer = kOuter;
  call.inner_bytes = inner;
  call.rows = rows;
  call.part_rows = static_cast<int64_t>(row_of.size());
  call.heads = kHeads;
  call.part_heads = static_cast<int64_t>(part.heads.size());
  call.row_runs = part.runs;
  call.head_of = part.heads;
  std::vector<uint8_t> values(kOuter * rows * kHeads * inner);
  for (size_t i = 0; i < values.size(); ++i) values[i] = (i * 2654435761u) >> 16;
  Buffer whole(values.size()), gathered(kOuter * call.part_rows * call.part_heads * inner);
  whole.Upload(values);
  call.whole = whole.get();
  call.part = gathered.get();
  LaunchAndWait(PrepareGather(call));
  const std::vector<uint8_t> found = gathered.Download<uint8_t>();
  bool passed = gathered.GuardsIntact();
  for (int64_t o = 0; o < kOuter; ++o) {
    for (int64_t r = 0; r < call.part_rows; ++r) {
      for (int64_t h = 0; h < call.part_heads; ++h) {
        const int64_t from = Place(heads_first, o, rows, kHeads, row_of[r], part.heads[h]) * inner;
        const int64_t to = Place(heads_first, o, call.part_rows, call.part_heads, r, h) * inner;
        passed = passed && std::memcmp(&found[to], &values[from], inner) == 0;
      }
    }
  }
  if (!passed) {
    std::printf("gather: heads_first %d rows %d bytes %d\n", heads_first, static_cast<int>(rows),
                static_cast<int>(inner));
  }
  return passed;
}

std::vector<float> Statistics(int64_t count, uint32_t seed) {
  std::vector<float> lse = Values(count, seed);
  for (int64_t i = 0; i < count; ++i) lse[i] = (i + seed) % 5 == 0 ? -INFINITY : 20 * lse[i];
  return lse;
}

// Sets the values of rows with an lse of -inf to 0.
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
  int64_t rows = kFewRows;
  bool same = false;  // fp32, final, not initial: the result is written to the values' memory
};

// The expected result of one row and head.
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
  // In merges, two parts have different heads at the same row.
  std::vector<Lists> lists = {
      {RunsOf(setting.rows),
       setting.merges ? std::vector<int32_t>{1, 4} : std::vector<int32_t>{1, 4, 4, 6}},
      {OtherRunsOf(setting.rows), {0, 6}},
      {{}, {2}}};
  // More parts of one head than a warp looks up at a time.
  for (int64_t part = 0; part < kPartsOfOneHead; ++part) {
    lists.push_back({{{part * 4 + 1, 1, 1, 0}}, {3}});
  }
  const int64_t rows = setting.rows, width = setting.width, count = kOuter * rows * kHeads;
  std::vector<float> before_lse = Statistics(count, 2), before = Values(count * width, 4);
  if (setting.merges) ZeroWhereNothing(before_lse, rows, kHeads, width, before);
  const std::vector<float> sinks = Statistics(kHeads, 9);
  std::vector<Expected> expected(count);
  const auto at = [&](int64_t o, int64_t row, int64_t head) {
    return Place(setting.heads_first, o, rows, kHeads, row, head);
  };
  for (int64_t i = 0; i < count; ++i) expected[i].values.assign(width, 0.0);
  for (int64_t o = 0; o < kOuter && !setting.initial; ++o) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < kHeads; ++h) {
        Expected& one = expected[at(o, r, h)];
        for (int64_t i = 0; i < width; ++i) one.values[i] = before[at(o, r, h) * width + i];
        if (setting.merges) one.lse = before_lse[Place(true, o, rows, kHeads, r, h)];
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
  call.rows = rows;
  call.heads = kHeads;
  call.width = width;
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto upload = [&](const std::vector<float>& values) {
    buffers.push_back(std::make_unique<Buffer>(values.size() * 4));
    buffers.back()->Upload(values);
    return buffers.back()->get<float>();
  };
  for (size_t p = 0; p < lists.size(); ++p) {
    const std::vector<int64_t> row_of = lists[p].Rows();
    const auto part_rows = static_cast<int64_t>(row_of.size());
    const auto heads = static_cast<int64_t>(lists[p].heads.size());
    const int64_t part_count = kOuter * part_rows * heads;
    const std::vector<float> lse = Statistics(part_count, 3 + p);
    std::vector<float> values = Values(part_count * width, 5 + p);
    if (setting.merges) ZeroWhereNothing(lse, part_rows, heads, width, values);
    for (int64_t o = 0; o < kOuter; ++o) {
      for (int64_t r = 0; r < part_rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          Expected& one = expected[at(o, row_of[r], lists[p].heads[h])];
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
  if (setting.final) call.result = setting.same ? sums.get() : result.get();
  if (setting.merges) call.lse = lses.get<float>();
  LaunchAndWait(PrepareScatter(call));

  std::vector<float> found(count * width);
  if (setting.final && !setting.same) {
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
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const double value = expected[at(o, r, h)].lse;
        const float lse = found_lse[Place(true, o, rows, kHeads, r, h)];
        passed = passed && (lse == value || std::fabs(lse - value) < 1e-4);
      }
    }
  }
  if (!passed) {
    std::printf(
        "scatter: merges %d heads_first %d initial %d final %d sinks %d %s width %d rows %d same "
        "%d\n",
        setting.merges, setting.heads_first, setting.initial, setting.final, setting.sinks,
        std::string(DTypeName(setting.dtype)).c_str(), static_cast<int>(width),
        static_cast<int>(rows), setting.same);
  }
  return passed;
}

}  // namespace

bool PartsAreParts() {
  bool passed = true;
  for (const int64_t rows : {kFewRows, kManyRows}) {
    for (const bool heads_first : {false, true}) {
      for (const int64_t inner : {2, 4, 7, 12, 48}) {
        passed = Gathers(heads_first, rows, inner) && passed;
      }
      for (const int64_t width : {1, 33, 300}) {
        if (width > (rows != kFewRows ? 1 : heads_first ? 300 : 256)) continue;
        passed =
            Scatters({false, heads_first, false, false, false, DType::kFloat32, width, rows}) &&
            passed;
      }
    }
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t width : {5, 64, 256, 300, 576}) {
      for (const bool merges : {false, true}) {
        for (const bool initial : {false, true}) {
          for (const bool final : {false, true}) {
            passed = Scatters({merges, false, initial, final, false, dtype, width}) && passed;
          }
          if (merges) {
            passed = Scatters({true, false, initial, true, true, dtype, width}) && passed;
          }
        }
        if (dtype == DType::kFloat32) {
          passed = Scatters({merges, false, false, true, merges, dtype, width, kFewRows, true}) &&
                   passed;
        }
      }
    }
  }
  for (const bool merges : {false, true}) {
    for (const int64_t width : {5, 8}) {
      passed = Scatters({merges, false, false, true, merges, DType::kBFloat16, width, kManyRows}) &&
               passed;
    }
  }
  return passed;
}

}  // namespace ringattn::worker::cuda::check
