// Times one forward and one backward shape after checking sampled rows, e.g.
//   cpu_kernels_bench --dtype=bf16 --seq=4096 --head_dim=64 --threads=2
// prints
//   forward  bf16 seq 4096 heads 8/8 d 64 causal threads 2: 31.20 ms 551 GFLOP/s (62.1 cpu ms)
//   backward ...
// with medians of wall time and of processor time; on a shared machine the
// latter, with one thread, is what a change of a kernel is judged by.
// Operations are counted as 4 * seq^2 * d * heads forward, 10 backward, halved
// when causal. Backward includes delta, zeroing and the conversion of the gradients.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/naive/naive_kernels.h"

ABSL_FLAG(std::string, dtype, "fp32", "fp32, bf16 or fp16");
ABSL_FLAG(int64_t, seq, 4096, "queries and keys");
ABSL_FLAG(int64_t, batch, 1, "batch");
ABSL_FLAG(int64_t, heads, 8, "query heads");
ABSL_FLAG(int64_t, kv_heads, 0, "key heads, 0 = heads");
ABSL_FLAG(int64_t, head_dim, 64, "d, of q, k and v");
ABSL_FLAG(bool, causal, true, "causal mask");
ABSL_FLAG(bool, backward, true, "time backward too");
ABSL_FLAG(std::vector<std::string>, terms, {},
          "score terms: alibi, bias (per head), bias1 (one for all), mask, bits, ids (8 segments), "
          "dropout, dbias (times the bias's gradient with backward, unchecked)");
ABSL_FLAG(int, threads, 2, "compute threads");
ABSL_FLAG(int, repeats, 3, "timed runs; the median is printed");

namespace ringattn::worker {
namespace {

struct Bench {
  AttentionProblem problem;
  int64_t seq = 0;
  std::vector<char> q, k, v, dout, out, dq, dk, dv;
  std::vector<float> lse, delta, dq_acc, dk_acc, dv_acc;
  const std::atomic<bool> stop{false};
  TermOperands terms;
  std::vector<char> bias, dbias;
  std::vector<uint8_t> mask;
  std::vector<int32_t> ids;

  bool Has(const std::string& name) const {
    const std::vector<std::string> names = absl::GetFlag(FLAGS_terms);
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  void SetTerms() {
    ScoreTerms& wanted = problem.terms;
    wanted.shifts = {0};
    wanted.columns = seq;
    if (Has("alibi")) wanted.alibi_slopes.assign(problem.num_heads, 0.01f);
    if (Has("dropout")) wanted.dropout = {.threshold = 6554, .seed = 1};
    if (Has("bias") || Has("bias1")) {
      const int64_t planes = Has("bias") ? problem.num_heads : 1;
      wanted.bias = BiasForm{.per_head = Has("bias"), .gradient = Has("dbias")};
      const int64_t element = ElementBytes(problem.dtype);
      bias.resize(planes * seq * seq * element);
      dbias.resize(Has("dbias") ? bias.size() : 0);
      std::mt19937 random(9);
      std::vector<float> row(seq);
      for (int64_t r = 0; r < planes * seq; ++r) {
        for (float& value : row) value = 0x1p-31f * static_cast<float>(random()) - 1.0f;
        ConvertFromFloat(problem.dtype, row.data(), bias.data() + r * seq * element, seq);
      }
      terms.bias = bias.data();
    }
    if (Has("mask") || Has("bits")) {
      wanted.mask = MaskForm{.bits = Has("bits")};
      mask.resize(seq * wanted.mask_row_bytes());
      std::mt19937 random(8);
      for (uint8_t& byte : mask) {
        byte = static_cast<uint8_t>(Has("bits") ? random() : random() % 2);
      }
      terms.mask = mask.data();
    }
    if (!Has("ids")) return;
    wanted.segment_ids = true;
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t t = 0; t < seq; ++t) ids.push_back(static_cast<int32_t>(8 * t / seq));
    }
    terms.q_segment_ids = ids.data();
  }

  int64_t QCount() const { return problem.batch * seq * problem.num_heads * problem.head_dim; }
  int64_t KCount() const { return problem.batch * seq * problem.num_kv_heads * problem.head_dim; }

  float At(const std::vector<char>& tensor, int64_t i) const {
    float value;
    ConvertToFloat(problem.dtype, tensor.data() + i * ElementBytes(problem.dtype), &value, 1);
    return value;
  }

  void Fill() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto [tensor, count] :
         {std::pair{&q, QCount()}, {&k, KCount()}, {&v, KCount()}, {&dout, QCount()}}) {
      std::vector<float> values(count);
      for (float& value : values) value = normal(random);
      tensor->resize(count * ElementBytes(problem.dtype));
      ConvertFromFloat(problem.dtype, values.data(), tensor->data(), count);
    }
    out.resize(q.size());
    dq.resize(q.size());
    dk.resize(k.size());
    dv.resize(k.size());
    lse.resize(problem.batch * seq * problem.num_heads);
    delta.resize(lse.size());
    dq_acc.resize(QCount());
    dk_acc.resize(KCount());
    dv_acc.resize(KCount());
  }

  KvBlock Block() {
    return {seq, {{0, seq, 0, 0, 1}}, k.data(), v.data(), dk_acc.data(), dv_acc.data(), ids.data()};
  }

  void Run(CpuKernels& kernels, const KernelCall& call) { Check(kernels.Run(call, stop, nullptr)); }

  static void Check(const absl::Status& status) {
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      std::exit(1);
    }
  }

  void Forward(CpuKernels& kernels) {
    ForwardCall call;
    call.problem = &problem;
    call.q_rows = seq;
    call.q_pieces = {{0, seq, 0, 0, 1}};
    call.q = q.data();
    call.blocks = {Block()};
    call.lse = lse.data();
    call.out = out.data();
    call.initial = call.final = true;
    call.terms = terms;
    Run(kernels, call);
  }

  void Backward(CpuKernels& kernels) {
    Run(kernels, DeltaCall{&problem, seq, out.data(), dout.data(), delta.data()});
    for (std::vector<float>* acc : {&dq_acc, &dk_acc, &dv_acc}) {
      Run(kernels, ZeroCall{acc->data(), static_cast<int64_t>(acc->size() * sizeof(float))});
    }
    BackwardCall call;
    call.problem = &problem;
    call.q_rows = seq;
    call.q_pieces = {{0, seq, 0, 0, 1}};
    call.q = q.data();
    call.dout = dout.data();
    call.lse = lse.data();
    call.delta = delta.data();
    call.dq_acc = dq_acc.data();
    call.blocks = {Block()};
    call.terms = terms;
    if (Has("dbias")) {
      BiasGradientCall gradient{&problem,   seq,          call.q_pieces, q.data(), dout.data(),
                                lse.data(), delta.data(), {Block()},     terms,    dbias.data()};
      Check(kernels.RunGradients(call, gradient, stop, nullptr));
    } else {
      Run(kernels, call);
    }
    Run(kernels, ConvertCall{problem.dtype, dq.data(), dq_acc.data(), QCount()});
    Run(kernels, ConvertCall{problem.dtype, dk.data(), dk_acc.data(), KCount()});
    Run(kernels, ConvertCall{problem.dtype, dv.data(), dv_acc.data(), KCount()});
  }

  // A row's own tensors of a call of that row alone; of several planes where they have any.
  template <typename T>
  static std::vector<T> RowOf(const std::vector<T>& planes, int64_t rows, int64_t row,
                              int64_t row_size) {
    std::vector<T> own;
    for (size_t plane = 0; plane * rows * row_size < planes.size(); ++plane) {
      const auto begin = planes.begin() + (plane * rows + row) * row_size;
      own.insert(own.end(), begin, begin + row_size);
    }
    return own;
  }

  // Returns the largest error of sampled rows of out and dq of the first batch row, compared with
  // the naive definition (naive_kernels.h), relative to their rows' largest element.
  double SampledError(bool with_gradients) const {
    const int64_t d = problem.head_dim, row_size = problem.num_heads * d;
    AttentionProblem one = problem;
    one.batch = 1;
    one.fp32_results = true;
    std::vector<float> dk_of_row(seq * problem.num_kv_heads * d), dv_of_row(dk_of_row.size());
    const KvBlock block = {seq,       {{0, seq, 0, 0, 1}}, k.data(),
                           v.data(),  dk_of_row.data(),    dv_of_row.data(),
                           ids.data()};
    double worst = 0.0;
    for (int64_t sample = 0; sample < 6; ++sample) {
      const int64_t i = sample * (seq - 1) / 5;
      const std::vector<Piece> pieces = {{0, 1, 0, i, 1}};
      const int64_t element = ElementBytes(problem.dtype);
      const std::vector<char> bias_row = RowOf(bias, seq, i, seq * element);
      const std::vector<uint8_t> mask_row =
          mask.empty() ? mask : RowOf(mask, seq, i, problem.terms.mask_row_bytes());
      const TermOperands own = {bias_row.data(), mask_row.data(),
                                ids.data() + (ids.empty() ? 0 : i)};
      std::vector<float> exact(row_size), row_lse(problem.num_heads), dq_exact(row_size);
      ForwardCall forward;
      forward.problem = &one;
      forward.q_rows = 1;
      forward.q_pieces = pieces;
      forward.q = q.data() + i * row_size * element;
      forward.blocks = {block};
      forward.lse = row_lse.data();
      forward.out = exact.data();
      forward.initial = forward.final = true;
      forward.terms = own;
      RunNaively(forward);
      worst = std::max(worst, RowError(exact, out, i));
      // A row that sees one key has no gradient but for rounding: that key gets all the weight.
      if (!with_gradients || i == 0) continue;
      std::vector<float> row_delta;
      for (int64_t h = 0; h < problem.num_heads; ++h) row_delta.push_back(delta[h * seq + i]);
      BackwardCall backward;
      backward.problem = &one;
      backward.q_rows = 1;
      backward.q_pieces = pieces;
      backward.q = forward.q;
      backward.dout = dout.data() + i * row_size * element;
      backward.lse = row_lse.data();
      backward.delta = row_delta.data();
      backward.dq_acc = dq_exact.data();
      backward.blocks = {block};
      backward.terms = own;
      RunNaively(backward);
      worst = std::max(worst, RowError(dq_exact, dq, i));
    }
    return worst;
  }

  double RowError(const std::vector<float>& exact, const std::vector<char>& tensor,
                  int64_t row) const {
    double largest = 0.0, error = 0.0;
    for (size_t e = 0; e < exact.size(); ++e) {
      const double difference =
          std::abs(exact[e] -
                   At(tensor, row * static_cast<int64_t>(exact.size()) + static_cast<int64_t>(e)));
      if (!(difference < INFINITY)) return INFINITY;
      largest = std::max(largest, std::abs(double{exact[e]}));
      error = std::max(error, difference);
    }
    return error / std::max(largest, 1e-30);
  }
};

struct Milliseconds {
  double wall = 0.0;
  double processor = 0.0;
};

double Median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Body>
Milliseconds MedianTime(int repeats, const Body& body) {
  std::vector<double> wall;
  std::vector<double> processor;
  for (int r = 0; r < repeats; ++r) {
    const auto start = std::chrono::steady_clock::now();
    const std::clock_t processor_start = std::clock();
    body();
    processor.push_back(1e3 * (std::clock() - processor_start) / CLOCKS_PER_SEC);
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    wall.push_back(elapsed.count());
  }
  return {Median(wall), Median(processor)};
}

int Main() {
  const std::optional<DType> dtype = DTypeFromName(absl::GetFlag(FLAGS_dtype));
  if (!dtype.has_value()) {
    std::fprintf(stderr, "--dtype: is %s, must be fp32, bf16 or fp16\n",
                 absl::GetFlag(FLAGS_dtype).c_str());
    return 2;
  }
  Bench bench;
  bench.seq = absl::GetFlag(FLAGS_seq);
  const int64_t d = absl::GetFlag(FLAGS_head_dim);
  const int64_t heads = absl::GetFlag(FLAGS_heads);
  const int64_t kv_heads =
      absl::GetFlag(FLAGS_kv_heads) > 0 ? absl::GetFlag(FLAGS_kv_heads) : heads;
  AttentionOptions options;
  options.causal = absl::GetFlag(FLAGS_causal);
  bench.problem = {*dtype,
                   absl::GetFlag(FLAGS_batch),
                   heads,
                   kv_heads,
                   d,
                   d,
                   1.0f / std::sqrt(static_cast<float>(d)),
                   0.0f,
                   {DocumentBand(options, bench.seq, bench.seq)}};
  bench.Fill();
  bench.SetTerms();
  const int threads = absl::GetFlag(FLAGS_threads);
  const bool with_backward = absl::GetFlag(FLAGS_backward);
  CpuKernels kernels(threads);
  bench.Forward(kernels);
  if (with_backward) bench.Backward(kernels);
  const double error = bench.SampledError(with_backward);
  const double limit = *dtype == DType::kBFloat16 ? 2e-2 : *dtype == DType::kFloat16 ? 3e-3 : 3e-5;
  if (!(error <= limit)) {
    std::fprintf(stderr, "sampled rows are wrong by %g\n", error);
    return 1;
  }
  const int repeats = absl::GetFlag(FLAGS_repeats);
  const double work = 4.0 * bench.problem.batch * heads * double(bench.seq) * bench.seq * d *
                      (options.causal ? 0.5 : 1.0) * 1e-6;
  const auto report = [&](const char* pass, double flops, Milliseconds time) {
    std::printf(
        "%-8s %s seq %lld heads %lld/%lld d %lld%s threads %d: %.3f ms %.1f GFLOP/s "
        "(%.3f cpu ms)\n",
        pass, absl::GetFlag(FLAGS_dtype).c_str(), static_cast<long long>(bench.seq),
        static_cast<long long>(heads), static_cast<long long>(kv_heads), static_cast<long long>(d),
        options.causal ? " causal" : "", threads, time.wall, flops / time.wall, time.processor);
  };
  report("forward", work, MedianTime(repeats, [&] { bench.Forward(kernels); }));
  if (with_backward) {
    report("backward", 2.5 * work, MedianTime(repeats, [&] { bench.Backward(kernels); }));
  }
  return 0;
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::worker::Main();
}
