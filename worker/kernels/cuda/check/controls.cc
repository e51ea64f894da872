#include "worker/kernels/cuda/check/controls.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/check/part_controls.h"
#include "worker/kernels/cuda/check/probability_controls.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

// A family that computes the problem, and which of its kernels: those with score terms, or those of
// deterministic backwards.
struct Kernels {
  const char* family;
  bool terms = false;
  bool deterministic = false;
};
constexpr Kernels kAllKernels[] = {
    {""}, {"sm80"}, {"simt"}, {"simt", /*terms=*/true}, {"", false, /*deterministic=*/true}};

// Returns the same problem, with a slope of 0 for kernels with terms.
AttentionProblem ForKernels(AttentionProblem problem, const Kernels& kernels) {
  problem.deterministic = kernels.deterministic;
  if (!kernels.terms) return problem;
  problem.terms.shifts = {0};
  problem.terms.alibi_slopes = {0.0f};
  return problem;
}

// Runs the backward of `forward`, whose q, k and v are zero, once normally and once stopped; the
// stopped run must add nothing. p is 1 / 128 for each of 128 rows, and each dout is 1.
bool StopWordEndsBackward(const DeviceInfo& device, const ForwardCall& forward) {
  const int64_t rows = forward.q_rows;
  const int64_t count = rows * forward.problem->head_dim;
  Buffer dout(count * 2), lse(rows * 4), delta(rows * 4), stop(4);
  Buffer dq(count * 4), dk(count * 4), dv(count * 4);
  dout.Upload(std::vector<uint16_t>(count, 0x3F80));  // bf16
  lse.Upload(std::vector<float>(rows, std::log(128.0f)));
  Check(StartZero({delta.get(), rows * 4}, nullptr));
  BackwardCall call;
  call.problem = forward.problem;
  call.q_rows = rows;
  call.q_pieces = forward.q_pieces;
  call.q = forward.q;
  call.dout = dout.get();
  call.lse = lse.get<float>();
  call.delta = delta.get<float>();
  call.dq_acc = dq.get<float>();
  call.blocks = forward.blocks;
  call.blocks[0].dk = dk.get<float>();
  call.blocks[0].dv = dv.get<float>();
  bool passed = true;
  for (const Kernels& kernels : kAllKernels) {
    const AttentionProblem problem = ForKernels(*forward.problem, kernels);
    call.problem = &problem;
    const Prepared prepared = PrepareBackward(call, device, {.family = kernels.family});
    for (Buffer* buffer : {&dq, &dk, &dv}) Check(StartZero({buffer->get(), count * 4}, nullptr));
    for (const uint32_t stopped : {0u, 1u}) {
      stop.Upload(std::vector<uint32_t>{stopped});
      LaunchAndWait(prepared, stop.get<uint32_t>());
      for (float x : dv.Download<float>()) passed = passed && std::fabs(x - 1.0f) < 1e-5f;
      for (float x : dq.Download<float>()) passed = passed && x == 0.0f;
    }
  }
  return passed;
}

// All scores are 0: lse must be the logarithm of the number of keys, or unchanged if the kernel was
// stopped.
bool StopWordEnds(const DeviceInfo& device, int64_t head_dim) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.softmax_scale = 0.125f;
  problem.bands = {Band{}};
  const int64_t n = 128;
  const int64_t bytes = n * head_dim * 2;
  Buffer q(bytes), k(bytes), v(bytes), out(bytes), lse(n * 4), stop(4);
  for (Buffer* buffer : {&q, &k, &v}) Check(StartZero({buffer->get(), bytes}, nullptr));
  ForwardCall call;
  call.problem = &problem;
  call.q_rows = n;
  call.q_pieces = {Piece{0, n, 0, 0, 1}};
  call.q = q.get();
  KvBlock block;
  block.rows = n;
  block.pieces = call.q_pieces;
  block.k = k.get();
  block.v = v.get();
  call.blocks = {block};
  call.lse = lse.get<float>();
  call.out = out.get();
  call.initial = call.final = true;
  bool passed = true;
  for (const Kernels& kernels : kAllKernels) {
    const AttentionProblem used = ForKernels(problem, kernels);
    call.problem = &used;
    const Prepared prepared =
        PrepareForward(call, device, {.family = kernels.family, .max_key_splits = 1});
    Check(StartZero({stop.get(), 4}, nullptr));
    LaunchAndWait(prepared, stop.get<uint32_t>());
    for (float x : lse.Download<float>()) passed = passed && std::fabs(x - std::log(128.0f)) < 1e-5;
    const std::vector<uint32_t> marks(n, 0xFFFFFFFF);
    lse.Upload(marks);
    stop.Upload(std::vector<uint32_t>{1});
    LaunchAndWait(prepared, stop.get<uint32_t>());
    for (uint32_t bits : lse.Download<uint32_t>()) passed = passed && bits == 0xFFFFFFFF;
  }
  call.problem = &problem;
  return passed && StopWordEndsBackward(device, call);
}

bool SumsAreSums() {
  std::vector<float> a(1001), b(1001);
  for (int i = 0; i < 1001; ++i) {
    a[i] = 0.37f * i;
    b[i] = 1.0f / (i + 1);
  }
  Buffer x(a.size() * 4), y(b.size() * 4);
  x.Upload(a);
  y.Upload(b);
  Check(StartAdd({x.get<float>(), y.get<float>(), 1001}, nullptr));
  const std::vector<float> sum = x.Download<float>();
  bool passed = true;
  for (int i = 0; i < 1001; ++i) passed = passed && sum[i] == a[i] + b[i];
  return passed;
}

// Merges partials of 300 rows of 5 heads, some without keys, and compares with the definition in
// double. The target is the second part.
bool MergesAreMerges() {
  constexpr int64_t kRows = 300, kHeads = 5, kParts = 4, kDim = 33;
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.num_heads = problem.num_kv_heads = kHeads;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.bands = {Band{}};
  const auto value = [](int64_t a, int64_t b) {
    return static_cast<float>((a * 2654435761u + b * 40503u) % 2001) / 1000.0f - 1.0f;
  };
  std::vector<std::vector<float>> outs(kParts), lses(kParts);
  Buffer out0(kRows * kHeads * kDim * 4), out1(kRows * kHeads * kDim * 4),
      out2(kRows * kHeads * kDim * 4), out3(kRows * kHeads * kDim * 4);
  Buffer lse0(kRows * kHeads * 4), lse1(kRows * kHeads * 4), lse2(kRows * kHeads * 4),
      lse3(kRows * kHeads * 4), rounded(kRows * kHeads * kDim * 2), sinks(kHeads * 4);
  Buffer* const out_buffers[] = {&out0, &out1, &out2, &out3};
  Buffer* const lse_buffers[] = {&lse0, &lse1, &lse2, &lse3};
  const std::vector<float> sink_values = {0.0f, -INFINITY, 1.0f, -2.0f, 5.0f};
  sinks.Upload(sink_values);
  for (int p = 0; p < kParts; ++p) {
    for (int64_t i = 0; i < kRows * kHeads * kDim; ++i) outs[p].push_back(value(i, p));
    for (int64_t i = 0; i < kRows * kHeads; ++i) {
      lses[p].push_back(i == 17 || (i + p) % 5 == 0 ? -INFINITY : 20 * value(i, p + 9));
    }
  }
  bool passed = true;
  for (const bool final : {false, true}) {
    MergeCall call;
    call.problem = &problem;
    call.q_rows = kRows;
    for (int p = 0; p < kParts; ++p) {
      out_buffers[p]->Upload(outs[p]);
      lse_buffers[p]->Upload(lses[p]);
      call.parts.push_back({out_buffers[p]->get<float>(), lse_buffers[p]->get<float>()});
    }
    call.final = final;
    call.sinks = sinks.get<float>();
    call.out_acc = out1.get<float>();
    call.lse = lse1.get<float>();
    call.out = rounded.get();
    Check(StartMerge(call, nullptr));
    const std::vector<float> lse = lse1.Download<float>(), out = out1.Download<float>();
    const std::vector<uint16_t> bits = rounded.Download<uint16_t>();
    for (int64_t at = 0; at < kRows * kHeads; ++at) {
      const int64_t h = at / kRows, row = at % kRows;
      double max = final ? sink_values[h] : -INFINITY, sum = 0;
      for (const auto& part : lses) max = std::max<double>(max, part[at]);
      if (max == -INFINITY) {
        passed = passed && lse[at] == -INFINITY;
      } else {
        if (final) sum += std::exp(sink_values[h] - max);
        for (const auto& part : lses) sum += std::exp(part[at] - max);
        passed = passed && std::fabs(lse[at] - (max + std::log(sum))) < 1e-4;
      }
      for (int64_t d = 0; d < kDim; ++d) {
        const int64_t e = (row * kHeads + h) * kDim + d;
        double expected = 0;
        for (int p = 0; p < kParts && sum > 0; ++p) {
          expected += std::exp(lses[p][at] - max) / sum * outs[p][e];
        }
        const uint32_t wide = uint32_t{bits[e]} << 16;
        float actual = out[e];
        if (final) std::memcpy(&actual, &wide, 4);
        passed = passed && std::fabs(actual - expected) < (final ? 1e-2 : 1e-5);
      }
    }
  }
  for (Buffer* buffer : out_buffers) passed = passed && buffer->GuardsIntact();
  return passed && rounded.GuardsIntact();
}

// Copies runs whose bytes and pitches are multiples of 16, of 4, of 2 and of 1.
bool CopiesAreCopies() {
  bool passed = true;
  for (const int64_t unit : {16, 4, 2, 1}) {
    const int64_t runs = 37, run_bytes = 5 * unit, from = 9 * unit, to = 7 * unit;
    std::vector<uint8_t> source(runs * from);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 31);
    Buffer a(source.size()), b(runs * to);
    a.Upload(source);
    Check(StartCopy({b.get(), a.get(), runs, run_bytes, from, to}, nullptr));
    const std::vector<uint8_t> target = b.Download<uint8_t>();
    for (int64_t r = 0; r < runs; ++r) {
      for (int64_t i = 0; i < to; ++i) {
        passed = passed && target[r * to + i] == (i < run_bytes ? source[r * from + i] : 0xff);
      }
    }
    passed = passed && b.GuardsIntact();
  }
  return passed;
}

int Report(const char* name, bool passed) {
  std::printf("%s: %s\n", name, passed ? "passed" : "FAILED");
  return passed ? 0 : 1;
}

}  // namespace

int CheckControls(const DeviceInfo& device) {
  int failed = 0;
  for (const int64_t head_dim : {64, 96, 128, 256}) {
    failed += Report("stop word", StopWordEnds(device, head_dim));
  }
  failed += Report("merges", MergesAreMerges());
  failed += Report("copies", CopiesAreCopies());
  failed += Report("parts", PartsAreParts());
  failed += Report("probabilities", ProbabilitiesAreProbabilities(device));
  return failed + Report("sums", SumsAreSums());
}

}  // namespace ringattn::worker::cuda::check
