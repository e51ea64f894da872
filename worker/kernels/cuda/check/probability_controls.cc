#include "worker/kernels/cuda/check/probability_controls.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kQueries = 20, kKeys = 300, kColumns = 301, kHeads = 6, kKvHeads = 2, kDim = 72;
constexpr int64_t kInDocument = 18;  // later rows have no document

class Control {
 public:
  explicit Control(const DeviceInfo& device) : device_(device) {
    problem_.dtype = DType::kBFloat16;
    problem_.num_heads = kHeads;
    problem_.num_kv_heads = kKvHeads;
    problem_.head_dim = problem_.head_dim_v = kDim;
    problem_.softmax_scale = 0.125f;
    // Row i, at position 10 i, sees the ten keys from 10 i + 3 on.
    problem_.bands = {Band{.lower = 3, .upper = 12}};
    std::vector<float> lse;
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kQueries; ++i) lse.push_back(Lse(i));
    }
    lse_.Upload(lse);
    Check(StartZero({q_.get(), kQueries * kHeads * kDim * 2}, nullptr));
    Check(StartZero({k_.get(), kKeys * kKvHeads * kDim * 2}, nullptr));
  }

  // `calls`: number of calls, each with a part of the keys.
  bool Run(const std::vector<ChosenRow>& rows, int calls, bool stopped) {
    Buffer target(rows.size() * kHeads * kColumns * 4), stop(4);
    stop.Upload(std::vector<uint32_t>{stopped});
    for (int i = 0; i < calls; ++i) {
      ProbabilitiesCall call;
      call.problem = &problem_;
      call.q_rows = kQueries;
      call.q_pieces = {Piece{.length = kInDocument, .stride = 10}};
      call.q = q_.get();
      const int64_t begin = kKeys * i / calls, end = kKeys * (i + 1) / calls;
      call.blocks = {KvBlock{kKeys, {Piece{begin, end - begin, 0, begin, 1}}, k_.get()}};
      call.rows = rows;
      call.columns = kColumns;
      call.target = target.get<float>();
      call.lse = lse_.get<float>();
      call.initial = i == 0;
      call.final = i == calls - 1;
      LaunchAndWait(PrepareProbabilities(call, device_), stop.get<uint32_t>());
    }
    if (!target.GuardsIntact()) return false;
    const std::vector<float> found = target.Download<float>();
    bool passed = true;
    for (size_t at = 0; at < found.size(); ++at) {
      const int64_t row = rows[at / (kHeads * kColumns)].row;
      passed = passed && Right(row, static_cast<int64_t>(at) % kColumns, found[at], stopped);
    }
    return passed;
  }

 private:
  static bool Seen(int64_t row, int64_t key) {
    return row < kInDocument && key - 10 * row >= 3 && key - 10 * row <= 12;
  }
  static float Lse(int64_t row) { return row < kInDocument ? std::log(10.0f) : -INFINITY; }
  static bool Right(int64_t row, int64_t key, float found, bool stopped) {
    if (stopped) return !(found > 0);  // unchanged, or no key seen
    return Seen(row, key) ? std::fabs(found - 0.1f) < 1e-6f : found == 0.0f;
  }

  const DeviceInfo& device_;
  AttentionProblem problem_;
  Buffer q_{kQueries * kHeads * kDim * 2}, k_{kKeys * kKvHeads * kDim * 2};
  Buffer lse_{kQueries * kHeads * 4};
};

}  // namespace

bool ProbabilitiesAreProbabilities(const DeviceInfo& device) {
  Control control(device);
  const std::vector<ChosenRow> few = {{0, 4}, {0, 19}, {0, 4}};
  std::vector<ChosenRow> many;
  for (int64_t i = 0; i < 45; ++i) many.push_back({0, i * 7 % kQueries});
  bool passed = true;
  for (const auto& rows : {few, many}) {
    for (const int calls : {1, 3}) {
      for (const bool stopped : {false, true}) {
        passed = control.Run(rows, calls, stopped) && passed;
      }
    }
  }
  return passed;
}

}  // namespace ringattn::worker::cuda::check
