#include "worker/kernels/cuda/check/controls.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

// A family that computes the problem, and whether by its kernels with score terms.
struct Kernels {
  const char* family;
  bool terms;
};
constexpr Kernels kAllKernels[] = {{"", false}, {"sm80", false}, {"simt", false}, {"simt", true}};

// The same problem, with a slope of 0.
AttentionProblem WithTerms(AttentionProblem problem, bool terms) {
  if (!terms) return problem;
  problem.terms.shifts = {0};
  problem.terms.alibi_slopes = {0.0f};
  return problem;
}

// The backward of `forward`, whose q, k and v are zero, once as it is and once stopped: the second
// adds nothing. p is 1 / 128 for each of 128 rows, each dout 1.
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
    const AttentionProblem problem = WithTerms(*forward.problem, kernels.terms);
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

// Scores are 0: lse is the logarithm of the number of keys, or untouched if the kernel was stopped.
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
    const AttentionProblem used = WithTerms(problem, kernels.terms);
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
  return failed + Report("sums", SumsAreSums());
}

}  // namespace ringattn::worker::cuda::check
