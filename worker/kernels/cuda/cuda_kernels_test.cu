// Checks the CUDA kernels on a GPU: random problems over every option, dtype and
// head-dim class, cut into ring shards in several layouts, against the naive
// fp64 reference. Outputs are poisoned with NaN first, inputs are surrounded by
// NaN, and the outputs' surroundings must stay untouched.
//
//   cuda_kernels_test [--cases=N] [--seed=S] [--small] [--huge]
// --huge: scores of 1e4 to 1e36 before the random cases. sm90 does not pass them yet, nor does dv
// at the edge of the wide scores (docs/semantics.md).
// Exit code 0 iff everything passed. --small: a few tiny cases, for
// compute-sanitizer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/guarded_buffer.cuh"
#include "worker/kernels/cuda/huge_scores.cuh"
#include "worker/kernels/cuda/launch_and_wait.cuh"
#include "worker/kernels/cuda/reference.cuh"
#include "worker/kernels/cuda/sharded_case.cuh"

namespace ringattn::worker::cuda {
namespace {

// One judged tensor.
struct Verdict {
  bool passed = true;
  double worst_element = 0;                    // error / bound
  double norm = 0;                             // error / bound
  double expected = 0, actual = 0, bound = 0;  // of the worst element
};

// rows of `inner` elements share a maximal magnitude.
Verdict Judge(DType dtype, const std::vector<float>& actual, const std::vector<double>& exact,
              const std::vector<double>& twin, const std::vector<double>& magnitude,
              const std::vector<double>& floors, int64_t inner) {
  const double u = dtype == DType::kFloat32    ? std::ldexp(1, -20)
                   : dtype == DType::kBFloat16 ? std::ldexp(1, -9)
                                               : std::ldexp(1, -12);
  Verdict verdict;
  double error2 = 0, twin2 = 0, exact2 = 0, magnitude2 = 0, floor2 = 0;
  for (size_t row = 0; row < exact.size(); row += inner) {
    const double row_max =
        *std::max_element(magnitude.begin() + row, magnitude.begin() + row + inner);
    for (size_t i = row; i < row + inner; ++i) {
      const double error = std::fabs(actual[i] - exact[i]);
      const double bound = 8 * u * magnitude[i] + 1e-6 * row_max + floors[i] + 1e-30;
      if (!(error <= bound)) verdict.passed = false;
      const double ratio = error / bound;
      if (!(ratio <= verdict.worst_element)) {
        verdict.worst_element = ratio;
        verdict.expected = exact[i];
        verdict.actual = actual[i];
        verdict.bound = bound;
      }
      error2 += error * error;
      twin2 += (twin[i] - exact[i]) * (twin[i] - exact[i]);
      exact2 += exact[i] * exact[i];
      magnitude2 += magnitude[i] * magnitude[i];
      floor2 += floors[i] * floors[i];
    }
  }
  const double rows = std::max<double>(1, static_cast<double>(exact.size()) / inner);
  const double bound = 2 * std::sqrt(twin2) + 1e-5 * std::sqrt(exact2) + std::sqrt(floor2) +
                       4 * u * std::sqrt(magnitude2) / rows + 1e-30;
  verdict.norm = std::sqrt(error2) / bound;
  if (!(verdict.norm <= 1)) verdict.passed = false;
  return verdict;
}

template <typename Kernel, typename... Arguments>
void LaunchReference(Kernel kernel, int64_t threads, Arguments... arguments) {
  if (threads == 0) return;
  kernel<<<static_cast<unsigned>((threads + 127) / 128), 128>>>(arguments...);
  Check(cudaGetLastError(), "reference");
}

struct ReferenceResult {
  explicit ReferenceResult(int64_t count)
      : exact(count * 8), twin(count * 8), magnitude(count * 8), floor(count * 8) {}
  reference::Result view() const {
    return {exact.get<double>(), twin.get<double>(), magnitude.get<double>(), floor.get<double>()};
  }
  Buffer exact, twin, magnitude, floor;
};

Verdict JudgeTensor(DType dtype, const std::vector<float>& actual, const ReferenceResult& expected,
                    int64_t inner) {
  return Judge(dtype, actual, expected.exact.Download<double>(), expected.twin.Download<double>(),
               expected.magnitude.Download<double>(), expected.floor.Download<double>(), inner);
}

std::vector<float> ToFloats(DType dtype, const std::vector<char>& bits) {
  std::vector<float> result(bits.size() / ElementBytes(dtype));
  ConvertToFloat(dtype, bits.data(), result.data(), static_cast<int64_t>(result.size()));
  return result;
}

// Forward calls whose keys were split, by what else the call used: a run in which a
// kind never happened has not checked it.
struct SplitCounts {
  struct Kind {
    const char* name;
    int count = 0;
  };
  std::vector<Kind> kinds = {{"fp32"},           {"16-bit"},   {"causal"},    {"window"},
                             {"softcap"},        {"packed"},   {"strided"},   {"packed heads"},
                             {"separate heads"}, {"Dv != D"},  {"batch"},     {"merged after"},
                             {"merged into"},    {"one call"}, {"empty rows"}};

  std::map<std::string, int> calls;  // by family and direction, split or not

  void Count(const PreparedKernel& kernel, const char* direction) {
    ++calls[std::string(kernel.family()) + " " + direction];
  }

  void Add(const Case& c, const ForwardCall& call, bool has_empty_rows) {
    const bool packed_heads = c.heads > c.kv_heads && call.q_rows * (c.heads / c.kv_heads) <= 64;
    const bool used[] = {c.dtype == DType::kFloat32,
                         c.dtype != DType::kFloat32,
                         c.options.causal,
                         c.options.window_left >= 0 || c.options.window_right >= 0,
                         c.options.softcap > 0,
                         c.cu_q.size() > 2,
                         c.layout == Layout::kStriped && c.world > 1,
                         packed_heads,
                         c.heads > c.kv_heads && !packed_heads,
                         c.d != c.dv,
                         c.batch > 1,
                         !call.final,
                         !call.initial,
                         c.one_call && c.world > 1,
                         has_empty_rows};
    static_assert(sizeof(used) / sizeof(used[0]) == 15);
    for (size_t i = 0; i < kinds.size(); ++i) kinds[i].count += used[i];
  }

  // Prints the counts; false if a kind is missing.
  bool Complete() const {
    bool complete = true;
    std::printf("keys split:");
    for (const Kind& kind : kinds) {
      std::printf(" %s %d,", kind.name, kind.count);
      complete = complete && kind.count > 0;
    }
    std::printf("%s\n", complete ? "" : " INCOMPLETE");
    std::printf("calls:");
    for (const auto& [kind, count] : calls) std::printf(" %s %d,", kind.c_str(), count);
    std::printf("\n");
    return complete;
  }
};

bool RunCase(const Case& c, const DeviceInfo& real_device, uint32_t seed, Verdict (&worst)[5],
             SplitCounts& splits) {
  std::mt19937 random(seed);
  const int64_t element = ElementBytes(c.dtype);
  const int sq = c.sq(), sk = c.sk(), documents = static_cast<int>(c.cu_q.size()) - 1;
  const Tensor q =
      RandomTensor(c.dtype, int64_t{1} * c.batch * sq * c.heads * c.d, c.amplitude, random);
  const Tensor k =
      RandomTensor(c.dtype, int64_t{1} * c.batch * sk * c.kv_heads * c.d, c.amplitude, random);
  const Tensor v =
      RandomTensor(c.dtype, int64_t{1} * c.batch * sk * c.kv_heads * c.dv, 1.0f, random);
  const Tensor dout =
      RandomTensor(c.dtype, int64_t{1} * c.batch * sq * c.heads * c.dv, 1.0f, random);
  DeviceInfo device = real_device;
  if (c.small_device) device.shared_bytes_per_block = 1024;

  AttentionProblem problem;
  problem.dtype = c.dtype;
  problem.batch = c.batch;
  problem.num_heads = c.heads;
  problem.num_kv_heads = c.kv_heads;
  problem.head_dim = c.d;
  problem.head_dim_v = c.dv;
  problem.softmax_scale = static_cast<float>(c.options.softmax_scale);
  problem.softcap = static_cast<float>(c.options.softcap);
  for (int i = 0; i < documents; ++i) {
    problem.bands.push_back(
        DocumentBand(c.options, c.cu_q[i + 1] - c.cu_q[i], c.cu_k[i + 1] - c.cu_k[i]));
  }

  // --- reference ---
  const int64_t rows = int64_t{1} * c.batch * c.heads * sq;
  std::vector<int> q_document(sq), k_document(sk);
  std::vector<int64_t> q_position(sq), k_position(sk), lower, upper;
  for (int i = 0; i < documents; ++i) {
    for (int64_t t = c.cu_q[i]; t < c.cu_q[i + 1]; ++t) {
      q_document[t] = i;
      q_position[t] = t - c.cu_q[i];
    }
    for (int64_t t = c.cu_k[i]; t < c.cu_k[i + 1]; ++t) {
      k_document[t] = i;
      k_position[t] = t - c.cu_k[i];
    }
    lower.push_back(problem.bands[i].lower);
    upper.push_back(problem.bands[i].upper);
  }
  Buffer q64(q.values.size() * 8), k64(k.values.size() * 8), v64(v.values.size() * 8),
      dout64(dout.values.size() * 8);
  q64.Upload(q.values);
  k64.Upload(k.values);
  v64.Upload(v.values);
  dout64.Upload(dout.values);
  Buffer qd(sq * 4), kd(sk * 4), qp(sq * 8), kp(sk * 8), lo(documents * 8), up(documents * 8);
  qd.Upload(q_document);
  kd.Upload(k_document);
  qp.Upload(q_position);
  kp.Upload(k_position);
  lo.Upload(lower);
  up.Upload(upper);
  Buffer s(rows * sk * 8), derivative(rows * sk * 8), dp(rows * sk * 8);
  Buffer dp_magnitude(rows * sk * 8), delta_magnitude(rows * 8);
  Buffer lse64(rows * 8), max64(rows * 8), bound64(rows * 8), delta64(rows * 8);
  reference::Problem p{c.batch,
                       c.heads,
                       c.kv_heads,
                       sq,
                       sk,
                       c.d,
                       c.dv,
                       c.dtype == DType::kFloat32    ? 0
                       : c.dtype == DType::kBFloat16 ? 1
                                                     : 2,
                       static_cast<double>(problem.softmax_scale),
                       static_cast<double>(problem.softcap),
                       q64.get<double>(),
                       k64.get<double>(),
                       v64.get<double>(),
                       dout64.get<double>(),
                       qd.get<int>(),
                       kd.get<int>(),
                       qp.get<int64_t>(),
                       kp.get<int64_t>(),
                       lo.get<int64_t>(),
                       up.get<int64_t>(),
                       s.get<double>(),
                       derivative.get<double>(),
                       dp.get<double>(),
                       dp_magnitude.get<double>(),
                       lse64.get<double>(),
                       max64.get<double>(),
                       bound64.get<double>(),
                       delta64.get<double>(),
                       delta_magnitude.get<double>()};
  ReferenceResult out_ref(rows * c.dv), dq_ref(rows * c.d),
      dk_ref(int64_t{1} * c.batch * sk * c.kv_heads * c.d),
      dv_ref(int64_t{1} * c.batch * sk * c.kv_heads * c.dv);
  LaunchReference(reference::Scores, rows * sk, p);
  LaunchReference(reference::Rows, rows, p);
  LaunchReference(reference::Out, rows * c.dv, p, out_ref.view());
  LaunchReference(reference::Delta, rows, p, out_ref.view());
  LaunchReference(reference::Dq, rows * c.d, p, dq_ref.view());
  LaunchReference(reference::Dkv, int64_t{1} * c.batch * sk * c.kv_heads * c.d, p, dk_ref.view(),
                  0);
  LaunchReference(reference::Dkv, int64_t{1} * c.batch * sk * c.kv_heads * c.dv, p, dv_ref.view(),
                  1);
  Check(cudaDeviceSynchronize(), "reference");
  const std::vector<double> lse_exact = lse64.Download<double>();
  const std::vector<double> lse_bound = bound64.Download<double>();
  const std::vector<double> delta_exact = delta64.Download<double>();
  const bool has_empty_rows =
      std::find(lse_exact.begin(), lse_exact.end(), -INFINITY) != lse_exact.end();

  // --- kernels ---
  const std::vector<Shard> q_shards = Cut(c.layout, c.world, c.cu_q);
  const std::vector<Shard> kv_shards = Cut(c.layout, c.world, c.cu_k);
  struct KvMemory {
    KvMemory(int64_t k_count, int64_t v_count, int64_t element)
        : k(k_count * element), v(v_count * element), dk(k_count * 4), dv(v_count * 4) {}
    Buffer k, v, dk, dv;
  };
  std::vector<std::unique_ptr<KvMemory>> kv_memory;
  std::vector<KvBlock> blocks;
  for (const Shard& shard : kv_shards) {
    const int64_t n = int64_t{1} * c.batch * static_cast<int64_t>(shard.tokens.size()) * c.kv_heads;
    kv_memory.push_back(std::make_unique<KvMemory>(n * c.d, n * c.dv, element));
    KvMemory& memory = *kv_memory.back();
    memory.k.Upload(Gather(k.bits, c.batch, sk, c.kv_heads * c.d * element, shard.tokens));
    memory.v.Upload(Gather(v.bits, c.batch, sk, c.kv_heads * c.dv * element, shard.tokens));
    Check(StartZero({memory.dk.get(), n * c.d * 4}, nullptr));
    Check(StartZero({memory.dv.get(), n * c.dv * 4}, nullptr));
    KvBlock block;
    block.rows = static_cast<int64_t>(shard.tokens.size());
    block.pieces = shard.pieces;
    block.k = memory.k.get();
    block.v = memory.v.get();
    block.dk = memory.dk.get<float>();
    block.dv = memory.dv.get<float>();
    blocks.push_back(block);
  }

  bool intact = true;
  std::vector<float> out(rows * c.dv), dq(rows * c.d), lse(rows);
  for (int r = 0; r < c.world; ++r) {
    const Shard& shard = q_shards[r];
    const int64_t n = static_cast<int64_t>(shard.tokens.size());
    const int64_t local_rows = c.batch * c.heads * n;
    Buffer q_local(local_rows * c.d * element), dout_local(local_rows * c.dv * element);
    Buffer out_acc(local_rows * c.dv * 4), out_local(local_rows * c.dv * element);
    Buffer lse_local(local_rows * 4), delta_local(local_rows * 4), dq_acc(local_rows * c.d * 4);
    Buffer dq_local(local_rows * c.d * element);
    q_local.Upload(Gather(q.bits, c.batch, sq, c.heads * c.d * element, shard.tokens));
    dout_local.Upload(Gather(dout.bits, c.batch, sq, c.heads * c.dv * element, shard.tokens));

    const int steps = c.one_call ? 1 : c.world;
    for (int step = 0; step < steps; ++step) {
      ForwardCall call;
      call.problem = &problem;
      call.q_rows = n;
      call.q_pieces = shard.pieces;
      call.q = q_local.get();
      if (c.one_call) {
        call.blocks = blocks;
      } else {
        call.blocks = {blocks[(r + c.world - step) % c.world]};
      }
      call.out_acc = steps == 1 ? nullptr : out_acc.get<float>();
      call.lse = lse_local.get<float>();
      call.out = out_local.get();
      call.initial = step == 0;
      call.final = step == steps - 1;
      // Short cases try the kernels for long key ranges too.
      const Prepared prepared = PrepareForward(call, device, {.long_keys = seed % 3 == 0 ? 1 : 0});
      LaunchAndWait(prepared);
      splits.Count(**prepared, "forward");
      // Only partial results need scratch.
      if ((*prepared)->scratch_bytes() > 0) splits.Add(c, call, has_empty_rows);
    }
    const std::vector<float> lse_host = lse_local.Download<float>();
    const std::vector<float> out_host = ToFloats(c.dtype, out_local.Download<char>());

    // The backward gets the exact lse and delta: it is judged alone.
    std::vector<float> lse_in(local_rows), delta_in(local_rows);
    for (int b = 0; b < c.batch; ++b) {
      for (int h = 0; h < c.heads; ++h) {
        for (int64_t t = 0; t < n; ++t) {
          const int64_t local = (int64_t{b} * c.heads + h) * n + t;
          const int64_t global = (int64_t{b} * c.heads + h) * sq + shard.tokens[t];
          lse[global] = lse_host[local];
          lse_in[local] = static_cast<float>(lse_exact[global]);
          delta_in[local] = static_cast<float>(delta_exact[global]);
          std::memcpy(&out[((int64_t{b} * sq + shard.tokens[t]) * c.heads + h) * c.dv],
                      &out_host[((b * n + t) * c.heads + h) * c.dv], c.dv * 4);
        }
      }
    }
    DeltaCall delta{&problem, n, out_local.get(), dout_local.get(), delta_local.get<float>()};
    Check(StartDelta(delta, nullptr));
    const std::vector<float> delta_host = delta_local.Download<float>();
    const std::vector<float> dout_host = ToFloats(c.dtype, dout_local.Download<char>());
    for (int64_t local = 0; local < local_rows; ++local) {
      const int64_t b = local / n / c.heads, h = local / n % c.heads, t = local % n;
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.dv; ++i) {
        const int64_t at = ((b * n + t) * c.heads + h) * c.dv + i;
        sum += static_cast<double>(out_host[at]) * dout_host[at];
        magnitude += std::fabs(static_cast<double>(out_host[at]) * dout_host[at]);
      }
      if (!(std::fabs(delta_host[local] - sum) <= 1e-5 * magnitude + 1e-30)) {
        std::printf("delta differs: %g, expected %g\n", delta_host[local], sum);
        intact = false;
      }
    }
    lse_local.Upload(lse_in);
    delta_local.Upload(delta_in);
    Check(StartZero({dq_acc.get(), local_rows * c.d * 4}, nullptr));
    for (int step = 0; step < steps; ++step) {
      BackwardCall call;
      call.problem = &problem;
      call.q_rows = n;
      call.q_pieces = shard.pieces;
      call.q = q_local.get();
      call.dout = dout_local.get();
      call.lse = lse_local.get<float>();
      call.delta = delta_local.get<float>();
      call.dq_acc = dq_acc.get<float>();
      if (c.one_call) {
        call.blocks = blocks;
      } else {
        call.blocks = {blocks[(r + c.world - step) % c.world]};
      }
      const Prepared prepared = PrepareBackward(call, device);
      LaunchAndWait(prepared);
      splits.Count(**prepared, "backward");
    }
    Check(StartConvert({c.dtype, dq_local.get(), dq_acc.get<float>(), local_rows * c.d}, nullptr));
    const std::vector<float> dq_host = ToFloats(c.dtype, dq_local.Download<char>());
    for (int b = 0; b < c.batch; ++b) {
      for (int64_t t = 0; t < n; ++t) {
        std::memcpy(&dq[(int64_t{b} * sq + shard.tokens[t]) * c.heads * c.d],
                    &dq_host[(b * n + t) * c.heads * c.d], c.heads * c.d * 4);
      }
    }
    intact = intact && out_local.GuardsIntact() && out_acc.GuardsIntact() &&
             lse_local.GuardsIntact() && dq_acc.GuardsIntact() && dq_local.GuardsIntact();
  }

  std::vector<float> dk(int64_t{1} * c.batch * sk * c.kv_heads * c.d),
      dv(int64_t{1} * c.batch * sk * c.kv_heads * c.dv);
  for (int r = 0; r < c.world; ++r) {
    const std::vector<int64_t>& tokens = kv_shards[r].tokens;
    for (int is_dv = 0; is_dv < 2; ++is_dv) {
      const Buffer& source = is_dv ? kv_memory[r]->dv : kv_memory[r]->dk;
      std::vector<float>& target = is_dv ? dv : dk;
      const int64_t inner = int64_t{1} * c.kv_heads * (is_dv ? c.dv : c.d);
      const int64_t n = static_cast<int64_t>(tokens.size());
      Buffer converted(c.batch * n * inner * element);
      Check(StartConvert({c.dtype, converted.get(), source.get<float>(), c.batch * n * inner},
                         nullptr));
      const std::vector<float> host = ToFloats(c.dtype, converted.Download<char>());
      for (int b = 0; b < c.batch; ++b) {
        for (int64_t t = 0; t < n; ++t) {
          std::memcpy(&target[(int64_t{b} * sk + tokens[t]) * inner], &host[(b * n + t) * inner],
                      inner * 4);
        }
      }
      intact = intact && source.GuardsIntact() && converted.GuardsIntact();
    }
  }

  Verdict verdicts[5];
  verdicts[0] = JudgeTensor(c.dtype, out, out_ref, c.dv);
  verdicts[1] = JudgeTensor(c.dtype, dq, dq_ref, c.d);
  verdicts[2] = JudgeTensor(c.dtype, dk, dk_ref, c.d);
  verdicts[3] = JudgeTensor(c.dtype, dv, dv_ref, c.dv);
  for (int64_t i = 0; i < rows; ++i) {
    if (lse_exact[i] == -INFINITY) {
      if (lse[i] != -INFINITY) verdicts[4].passed = false;
      continue;
    }
    const double ratio = std::fabs(lse[i] - lse_exact[i]) / (4e-6 * lse_bound[i]);
    if (!(ratio <= 1)) verdicts[4].passed = false;
    if (!(ratio <= verdicts[4].worst_element)) verdicts[4].worst_element = ratio;
  }
  bool passed = intact;
  for (int i = 0; i < 5; ++i) {
    passed = passed && verdicts[i].passed;
    worst[i].worst_element = std::max(worst[i].worst_element, verdicts[i].worst_element);
    worst[i].norm = std::max(worst[i].norm, verdicts[i].norm);
  }
  if (!passed) {
    std::printf("FAILED %s\n", c.ToString().c_str());
    const char* names[5] = {"out", "dq", "dk", "dv", "lse"};
    for (int i = 0; i < 5; ++i) {
      std::printf(
          "  %s: element %.3f (%.4g, expected %.4g, bound %.2g), norm %.3f of the bound%s\n",
          names[i], verdicts[i].worst_element, verdicts[i].actual, verdicts[i].expected,
          verdicts[i].bound, verdicts[i].norm, verdicts[i].passed ? "" : "  <--");
    }
    if (!intact) std::printf("  guards or delta violated\n");
  }
  return passed;
}

template <typename T>
T Pick(std::mt19937& random, std::initializer_list<T> choices) {
  return *(choices.begin() + random() % choices.size());
}

Case RandomCase(std::mt19937& random, bool small) {
  Case c;
  c.dtype = Pick(random, {DType::kBFloat16, DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  c.d = Pick(random, {32, 64, 96, 128, 192, 256, 128, 64, 16, 40, 72, 80, 112, 160, 7, 33, 250});
  c.dv = random() % 3 == 0 ? Pick(random, {32, 64, 128, 192, 256, 24, 13, 66}) : c.d;
  c.kv_heads = Pick(random, {1, 2, 3});
  c.heads = c.kv_heads * Pick(random, {1, 1, 2, 4, 5});
  c.batch = Pick(random, {1, 1, 2});
  const auto length = [&] {
    if (small) return Pick<int64_t>(random, {1, 31, 70, 130});
    return Pick<int64_t>(random, {0, 1, 5, 63, 64, 65, 127, 128, 129, 191, 257, 300, 383});
  };
  const int documents = random() % 3 == 0 ? 1 + random() % 6 : 1;
  c.cu_q = {0};
  c.cu_k = {0};
  const bool same = random() % 2;
  for (int i = 0; i < documents; ++i) {
    const int64_t n = length();
    c.cu_q.push_back(c.cu_q.back() + n);
    c.cu_k.push_back(c.cu_k.back() + (same ? n : length()));
  }
  if (documents == 1 && random() % 6 == 0) {  // decode: few queries, many keys
    c.cu_q = {0, Pick<int64_t>(random, {1, 2, 7, 16})};
    c.cu_k = {0, small ? int64_t{600} : Pick<int64_t>(random, {700, 1000, 2049})};
  }
  c.options.causal = random() % 2;
  if (random() % 3 == 0) c.options.window_left = Pick<int64_t>(random, {0, 1, 17, 64, 200});
  if (random() % 3 == 0) c.options.window_right = Pick<int64_t>(random, {0, 3, 50, 128});
  if (random() % 4 == 0) c.options.softcap = Pick(random, {2.0, 30.0, 50.0});
  c.options.softmax_scale = 1.0 / std::sqrt(static_cast<double>(c.d));
  if (random() % 8 == 0) c.options.softmax_scale = Pick(random, {0.3, 1.0, -0.1});
  c.world = Pick(random, {1, 1, 2, 3, 4});
  c.layout = Pick(random, {Layout::kContiguous, Layout::kZigzag, Layout::kStriped});
  c.one_call = random() % 3 == 0;
  c.small_device = c.dtype != DType::kFloat32 && random() % 10 == 0;
  if (random() % 10 == 0) c.amplitude = 4.0f;
  return c;
}

// The stop word ends kernels; sums are sums.
bool CheckControls(const DeviceInfo& device, int64_t head_dim) {
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
  for (const char* family : {"", "sm80", "simt"}) {
    const Prepared prepared = PrepareForward(call, device, {.family = family, .max_key_splits = 1});
    Check(StartZero({stop.get(), 4}, nullptr));
    LaunchAndWait(prepared, stop.get<uint32_t>());
    for (float x : lse.Download<float>()) passed = passed && std::fabs(x - std::log(128.0f)) < 1e-5;
    const std::vector<uint32_t> marks(n, 0xFFFFFFFF);
    lse.Upload(marks);
    stop.Upload(std::vector<uint32_t>{1});
    LaunchAndWait(prepared, stop.get<uint32_t>());
    for (uint32_t bits : lse.Download<uint32_t>()) passed = passed && bits == 0xFFFFFFFF;
  }

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
  for (int i = 0; i < 1001; ++i) passed = passed && sum[i] == a[i] + b[i];
  std::printf("controls: %s\n", passed ? "passed" : "FAILED");
  return passed;
}

int Main(int argc, char** argv) {
  int cases = 300;
  uint32_t seed = std::random_device()();
  bool small = false, huge = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--cases=", 8) == 0) cases = std::atoi(argv[i] + 8);
    if (std::strncmp(argv[i], "--seed=", 7) == 0) seed = std::strtoul(argv[i] + 7, nullptr, 10);
    if (std::strcmp(argv[i], "--small") == 0) small = true;
    if (std::strcmp(argv[i], "--huge") == 0) huge = true;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // a run that is cut off has said something
  const auto device = QueryDevice(0);
  Check(device.status());
  Check(LoadKernels(*device));
  std::printf("seed %u, %d cases\n", seed, cases);
  int failed = 0;
  for (int64_t head_dim : {64, 256}) failed += !CheckControls(*device, head_dim);
  if (huge) failed += CheckHugeScores(*device);
  std::mt19937 random(seed);
  Verdict worst[3][5];
  SplitCounts splits;
  for (int i = 0; i < cases; ++i) {
    const Case c = RandomCase(random, small);
    if (!RunCase(c, *device, random(), worst[static_cast<int>(c.dtype)], splits)) ++failed;
    if (failed > 20) break;
    if (i % 100 == 99) std::printf("%d done, %d failed\n", i + 1, failed);
  }
  for (int dtype = 0; dtype < 3; ++dtype) {
    std::printf("%s: worst element error / bound (norm error / bound): ",
                std::string(DTypeName(static_cast<DType>(dtype))).c_str());
    const char* names[5] = {"out", "dq", "dk", "dv", "lse"};
    for (int i = 0; i < 5; ++i) {
      std::printf("%s %.3f (%.3f)  ", names[i], worst[dtype][i].worst_element,
                  worst[dtype][i].norm);
    }
    std::printf("\n");
  }
  // In so many cases every kind happens, unless the split has stopped happening.
  const bool complete = splits.Complete();
  if (cases >= 300 && !small && !complete) ++failed;
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::worker::cuda

int main(int argc, char** argv) { return ringattn::worker::cuda::Main(argc, argv); }
