// Against the naive twin: parts of random rows and heads.
#include "worker/kernels/cpu/part_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "worker/kernels/naive/naive_kernels.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

struct Part {
  std::vector<RowRun> runs;
  std::vector<int32_t> heads;
  int64_t rows = 0;
  std::vector<float> values;
  std::vector<float> lse;
};

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}

  int64_t Below(int64_t end) {
    return static_cast<int64_t>(random_() % static_cast<uint32_t>(end));
  }
  float Value() { return static_cast<float>(Below(2001)) / 1000 - 1; }
  std::vector<float> Values(int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = Value();
    return values;
  }
  std::vector<float> Lse(int64_t count) {
    std::vector<float> lse(count);
    for (float& value : lse) value = Below(4) == 0 ? kNegativeInfinity : 20 * Value();
    return lse;
  }
  void Rows(int64_t rows, Part& part) {
    for (int64_t row = Below(5); row < rows;) {
      const int64_t step = 1 + Below(4), count = 1 + Below((rows - row - 1) / step + 1);
      part.runs.push_back({row, step, count, part.rows});
      part.rows += count;
      row += (count - 1) * step + 1 + Below(9);
    }
  }

 private:
  std::mt19937 random_;
};

// Parts with disjoint heads.
std::vector<Part> DrawParts(Draw& draw, const ScatterCall& call) {
  std::vector<Part> parts(1 + draw.Below(4));
  for (int32_t head = 0; head < call.heads; ++head) {
    if (draw.Below(4) != 0) parts[draw.Below(parts.size())].heads.push_back(head);
  }
  for (Part& part : parts) {
    if (!call.merges && !part.heads.empty()) part.heads.push_back(part.heads[0]);
    if (draw.Below(6) != 0) draw.Rows(call.rows, part);
    const int64_t count = call.outer * part.rows * static_cast<int64_t>(part.heads.size());
    part.values = draw.Values(count * call.width);
    part.lse = draw.Lse(count);
  }
  return parts;
}

TEST(PartRowsTest, ScattersAsTheNaiveTwin) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    ScatterCall call;
    call.merges = draw.Below(2) == 0;
    call.heads_first = !call.merges && draw.Below(4) == 0;
    call.initial = !call.heads_first && draw.Below(2) == 0;
    call.final = !call.heads_first && draw.Below(2) == 0;
    call.dtype = static_cast<DType>(draw.Below(3));
    const bool same =
        call.final && !call.initial && call.dtype == DType::kFloat32 && draw.Below(2) == 0;
    call.outer = 1 + draw.Below(3);
    call.rows = 1 + draw.Below(60);
    call.heads = 1 + draw.Below(6);
    call.width = 1 + draw.Below(70);
    const std::vector<Part> parts = DrawParts(draw, call);
    for (const Part& part : parts) {
      call.parts.push_back({part.rows, part.runs, part.heads, part.values.data(),
                            call.merges ? part.lse.data() : nullptr});
    }
    const int64_t count = call.outer * call.rows * call.heads;
    const std::vector<float> values = draw.Values(count * call.width), lse = draw.Lse(count);
    const std::vector<float> sinks = draw.Lse(call.heads);
    if (call.merges && call.final && draw.Below(2) == 0) call.sinks = sinks.data();

    // Nothing is read that is not there, and nothing written elsewhere.
    std::vector<float> found_values[2], found_lse[2];
    std::vector<char> found[2];
    for (const int which : {0, 1}) {
      found_values[which] = values;
      found_lse[which] = lse;
      if (call.initial) {
        found_values[which].assign(values.size(), NAN);
        found_lse[which].assign(lse.size(), NAN);
      }
      found[which].resize(count * call.width * 4);
      call.values = call.initial && call.final ? nullptr : found_values[which].data();
      call.result = !call.final ? nullptr
                    : same      ? static_cast<void*>(found_values[which].data())
                                : found[which].data();
      call.lse = call.merges ? found_lse[which].data() : nullptr;
      if (which == 0) {
        RunNaively(call);
      } else {
        const int64_t rows = call.outer * call.rows, middle = draw.Below(rows + 1);
        ScatterRows(call, middle, rows);
        ScatterRows(call, 0, middle);
      }
    }
    if (call.final && !same) {
      for (const int which : {0, 1}) {
        found_values[which].resize(values.size());
        ConvertToFloat(call.dtype, found[which].data(), found_values[which].data(),
                       static_cast<int64_t>(values.size()));
      }
    }
    const float bound = !call.final || call.dtype == DType::kFloat32 ? 1e-5f : 1.0f / 64;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(found_values[1][i], found_values[0][i], bound) << i;
    }
    for (size_t i = 0; i < lse.size() && call.merges; ++i) {
      if (found_lse[0][i] != found_lse[1][i]) {
        ASSERT_NEAR(found_lse[1][i], found_lse[0][i], 1e-4) << i;
      }
    }
  }
}

// Every second of 2^19 rows, in tasks of 64: as one run or as a run each it takes as long, but for
// what a cache misses. Were a task to pass by the runs before its own, it would be a hundred times.
TEST(PartRowsTest, ATaskDoesNotLookThroughTheRunsBeforeIt) {
  constexpr int64_t kRuns = int64_t{1} << 18, kRows = 2 * kRuns, kTask = 64;
  const std::vector<RowRun> one = {{0, 2, kRuns, 0}};
  std::vector<RowRun> many;
  std::vector<float> values, result(kRows);
  for (int64_t run = 0; run < kRuns; ++run) {
    many.push_back({2 * run, 1, 1, run});
    values.push_back(static_cast<float>(run));
  }
  const std::vector<int32_t> heads = {0};
  ScatterCall call;
  call.initial = call.final = true;
  call.rows = kRows;
  call.width = 1;
  call.result = result.data();
  double seconds[2];
  for (const int which : {0, 1}) {
    call.parts = {{kRuns, which == 0 ? one : many, heads, values.data(), nullptr}};
    seconds[which] = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::fill(result.begin(), result.end(), NAN);
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t row = 0; row < kRows; row += kTask) ScatterRows(call, row, row + kTask);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      seconds[which] = std::min(seconds[which], taken.count());
    }
    for (int64_t row = 0; row < kRows; ++row) {
      ASSERT_EQ(result[row], row % 2 == 0 ? static_cast<float>(row / 2) : 0.0f) << row;
    }
  }
  EXPECT_LT(seconds[1], 10 * seconds[0]);
}

TEST(PartRowsTest, GathersAsTheNaiveTwin) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    GatherCall call;
    call.heads_first = draw.Below(2) == 0;
    call.outer = 1 + draw.Below(3);
    call.rows = 1 + draw.Below(60);
    call.heads = 1 + draw.Below(6);
    call.inner_bytes = 1 + draw.Below(40);
    Part part;
    draw.Rows(call.rows, part);
    for (int64_t h = 1 + draw.Below(8); h > 0; --h) {
      part.heads.push_back(static_cast<int32_t>(draw.Below(call.heads)));
    }
    call.part_rows = part.rows;
    call.part_heads = static_cast<int64_t>(part.heads.size());
    call.row_runs = part.runs;
    call.head_of = part.heads;
    std::vector<char> whole(call.outer * call.rows * call.heads * call.inner_bytes);
    for (char& byte : whole) byte = static_cast<char>(draw.Below(256));
    call.whole = whole.data();
    std::vector<char> found[2];
    for (const int which : {0, 1}) {
      found[which].resize(call.outer * call.part_rows * call.part_heads * call.inner_bytes);
      call.part = found[which].data();
      if (which == 0) {
        RunNaively(call);
      } else {
        const int64_t rows = call.outer * call.part_rows, middle = draw.Below(rows + 1);
        GatherRows(call, middle, rows);
        GatherRows(call, 0, middle);
      }
    }
    EXPECT_EQ(found[0], found[1]);
  }
}

}  // namespace
}  // namespace ringattn::worker::cpu
