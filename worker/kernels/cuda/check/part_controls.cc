#include "worker/kernels/cuda/check/part_controls.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kOuter = 2, kRows = 200, kHeads = 7, kPartRows = 70;
const std::vector<RowRun> kRuns = {{3, 2, 40, 0}, {90, 3, 30, 40}};

int64_t RowOf(int64_t part_row) {
  const RowRun& run = kRuns[part_row < kRuns[1].first ? 0 : 1];
  return run.begin + (part_row - run.first) * run.step;
}

int64_t Place(bool heads_first, int64_t o, int64_t rows, int64_t heads, int64_t row, int64_t head) {
  return heads_first ? (o * heads + head) * rows + row : (o * rows + row) * heads + head;
}

PartCall CallOf(const std::vector<int32_t>& heads, bool heads_first, int64_t inner) {
  PartCall call;
  call.heads_first = heads_first;
  call.outer = kOuter;
  call.inner_bytes = inner * 4;
  call.rows = kRows;
  call.part_rows = kPartRows;
  call.heads = kHeads;
  call.part_heads = static_cast<int64_t>(heads.size());
  call.row_runs = kRuns;
  call.head_of = heads;
  return call;
}

std::vector<float> Values(int64_t count, uint32_t seed) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>((i * 2654435761u + seed * 40503u) % 2001) / 1e3f - 1.0f);
  }
  return values;
}

// What is gathered, and then added where it came from.
bool Copies(bool heads_first, int64_t inner) {
  const std::vector<int32_t> heads = {1, 4, 4, 6};
  PartCall call = CallOf(heads, heads_first, inner);
  const std::vector<float> values = Values(kOuter * kRows * kHeads * inner, 1);
  Buffer whole(static_cast<int64_t>(values.size()) * 4);
  Buffer part(kOuter * kPartRows * call.part_heads * inner * 4);
  whole.Upload(values);
  call.whole = whole.get();
  call.part = part.get();
  call.kind = PartCall::Kind::kGather;
  LaunchAndWait(PreparePart(call));
  const std::vector<float> gathered = part.Download<float>();
  call.kind = PartCall::Kind::kAdd;
  LaunchAndWait(PreparePart(call));
  std::vector<float> expected = values;
  bool passed = true;
  for (int64_t o = 0; o < kOuter; ++o) {
    for (int64_t r = 0; r < kPartRows; ++r) {
      for (int64_t h = 0; h < call.part_heads; ++h) {
        const int64_t from = Place(heads_first, o, kRows, kHeads, RowOf(r), heads[h]) * inner;
        const int64_t to = Place(heads_first, o, kPartRows, call.part_heads, r, h) * inner;
        for (int64_t i = 0; i < inner; ++i) {
          passed = passed && gathered[to + i] == values[from + i];
          expected[from + i] += values[from + i];
        }
      }
    }
  }
  return passed && whole.Download<float>() == expected && whole.GuardsIntact() &&
         part.GuardsIntact();
}

std::vector<float> Statistics(int64_t count, uint32_t seed) {
  std::vector<float> lse = Values(count, seed);
  for (int64_t i = 0; i < count; ++i) lse[i] = (i + seed) % 5 == 0 ? -INFINITY : 20 * lse[i];
  return lse;
}

bool Merges() {
  constexpr int64_t kDim = 33;
  const std::vector<int32_t> heads = {1, 4, 6};
  PartCall call = CallOf(heads, /*heads_first=*/false, kDim);
  call.kind = PartCall::Kind::kMerge;
  const int64_t count = kOuter * kRows * kHeads, part_count = kOuter * kPartRows * call.part_heads;
  std::vector<float> lse = Statistics(count, 2);
  const std::vector<float> part_lse = Statistics(part_count, 3);
  const std::vector<float> values = Values(count * kDim, 4), terms = Values(part_count * kDim, 5);
  Buffer whole(count * kDim * 4), part(part_count * kDim * 4), whole_lse(count * 4),
      part_lses(part_count * 4);
  whole.Upload(values);
  part.Upload(terms);
  whole_lse.Upload(lse);
  part_lses.Upload(part_lse);
  call.whole = whole.get();
  call.part = part.get();
  call.whole_lse = whole_lse.get<float>();
  call.part_lse = part_lses.get<float>();
  LaunchAndWait(PreparePart(call));
  std::vector<double> expected(values.begin(), values.end());
  for (int64_t o = 0; o < kOuter; ++o) {
    for (int64_t r = 0; r < kPartRows; ++r) {
      for (int64_t h = 0; h < call.part_heads; ++h) {
        float& before = lse[Place(true, o, kRows, kHeads, RowOf(r), heads[h])];
        const float with = part_lse[Place(true, o, kPartRows, call.part_heads, r, h)];
        const double max = std::fmax(before, with);
        if (max == -INFINITY) continue;
        const double first = std::exp(before - max), second = std::exp(with - max);
        for (int64_t d = 0; d < kDim; ++d) {
          double& element = expected[Place(false, o, kRows, kHeads, RowOf(r), heads[h]) * kDim + d];
          const double term = terms[Place(false, o, kPartRows, call.part_heads, r, h) * kDim + d];
          element = (first * element + second * term) / (first + second);
        }
        before = static_cast<float>(max + std::log(first + second));
      }
    }
  }
  bool passed = true;
  const std::vector<float> out = whole.Download<float>(), merged = whole_lse.Download<float>();
  for (int64_t i = 0; i < count * kDim; ++i) {
    passed = passed && std::fabs(out[i] - expected[i]) < 1e-5;
  }
  for (int64_t i = 0; i < count; ++i) {
    passed = passed && (merged[i] == lse[i] || std::fabs(merged[i] - lse[i]) < 1e-4);
  }
  return passed && whole.GuardsIntact() && whole_lse.GuardsIntact();
}

}  // namespace

bool PartsAreParts() {
  bool passed = Merges();
  for (const bool heads_first : {false, true}) {
    for (const int64_t inner : {1, 3, 12}) passed = Copies(heads_first, inner) && passed;
  }
  return passed;
}

}  // namespace ringattn::worker::cuda::check
