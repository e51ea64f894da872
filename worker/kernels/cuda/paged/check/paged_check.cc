// Checks the paged kernels on a GPU: random caches and steps against an fp64 reference.
//
//   paged_check [--cases=N] [--seed=S] [--only=I] [--small] [--portable] [--progress]
//
// Exit code 0 iff every case passed.
//   --only=I    runs case I of the N alone
//   --small     draws tiny cases alone, for compute-sanitizer
//   --portable  runs the portable kernels alone; by default every second case runs by both families
//   --progress  prints each case before it runs
//
// Each case runs by a plain launch, by a captured graph whose step did not exist at the capture,
// without the append, and with an input that the launches fetch and a signal of their end where the
// input is small enough. All must give the same bits. Entries that no row has are NaN, outputs are
// NaN before each run, and memory around and between results must stay untouched.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/paged/check/device_buffer.h"
#include "worker/kernels/cuda/paged/check/fetched_step.h"
#include "worker/kernels/cuda/paged/check/paged_case.h"
#include "worker/kernels/cuda/paged/check/parallel_for.h"
#include "worker/kernels/cuda/paged/check/reference.h"

namespace ringattn::worker::cuda::paged::check {
namespace {

constexpr int kMostFailures = 20;        // after which a run reports no more
constexpr double kMostProducts = 1.5e8;  // multiply-adds of one case's reference

struct Arguments {
  int cases = 1200;
  uint64_t seed = std::random_device()();
  int only = -1;  // all
  bool small = false;
  bool portable = false;
  bool progress = false;
};

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--cases=", 8) == 0) {
      arguments.cases = std::atoi(argv[i] + 8);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      arguments.seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else if (std::strncmp(argv[i], "--only=", 7) == 0) {
      arguments.only = std::atoi(argv[i] + 7);
    } else if (std::strcmp(argv[i], "--small") == 0) {
      arguments.small = true;
    } else if (std::strcmp(argv[i], "--portable") == 0) {
      arguments.portable = true;
    } else if (std::strcmp(argv[i], "--progress") == 0) {
      arguments.progress = true;
    } else {
      std::fprintf(stderr,
                   "paged_check [--cases=N] [--seed=S] [--only=I] [--small] [--portable] "
                   "[--progress]\n");
      std::exit(2);
    }
  }
  return arguments;
}

// The largest ratio of an error to its bound.
struct Worst {
  double out = 0.0, lse = 0.0;
};

// The device's copy of a case, and its results.
struct DeviceCase {
  DeviceBuffer cache, step, rows, tables, q, k, v, out, lse, sinks, workspace;
  FetchedStep fetched;

  Buffers buffers(const PagedCase& c) const {
    Buffers b;
    b.cache = cache.get<void>();
    b.step = step.get<PagedStep>();
    b.rows = rows.get<PagedRow>();
    b.tables = tables.get<int32_t>();
    b.q = q.get<void>();
    b.k = k.get<void>();
    b.v = v.get<void>();
    b.out = out.get<void>();
    b.lse = lse.get<float>();
    b.sinks = c.sinks.empty() ? nullptr : sinks.get<float>();
    b.workspace = workspace.get<void>();
    return b;
  }

  int64_t OutBytes(const PagedCase& c) const {
    const int64_t element = c.options.partial ? 4 : ElementBytes(c.shape.dtype);
    return int64_t{c.batch.max_total_q} * c.options.num_heads * c.shape.head_dim_v * element;
  }
  // Everything that one run reads and writes, as before the run.
  void UploadCache(const PagedCase& c) {
    cache.Reset(c.shape.bytes(), 0xFF);
    char* const plane = cache.get<char>() + c.plane * c.shape.plane_bytes();
    Check(cudaMemcpy(plane, c.k_before.data(), c.k_before.size(), cudaMemcpyHostToDevice), "K");
    Check(cudaMemcpy(plane + c.shape.k_plane_bytes(), c.v_before.data(), c.v_before.size(),
                     cudaMemcpyHostToDevice),
          "V");
  }
  void PoisonResults(const PagedCase& c) {
    out.Reset(OutBytes(c), 0xFF);
    lse.Reset(int64_t{c.options.num_heads} * c.batch.max_total_q * 4, 0xFF);
  }
  void UploadStep(const PagedCase& c) {
    PagedStep current;
    current.num_rows = static_cast<int32_t>(c.paged_rows.size());
    current.plane = c.plane;
    step.Upload(std::vector<PagedStep>{current});
    rows.Upload(c.paged_rows);
    tables.Upload(c.tables);
  }
  void Upload(const PagedCase& c) {
    UploadCache(c);
    PoisonResults(c);
    step.Reset(sizeof(PagedStep), 0);  // no rows
    rows.Reset(c.batch.max_rows * sizeof(PagedRow), 0x7F);
    tables.Reset(std::max<size_t>(c.tables.size(), 1) * 4, 0x7F);
    q.Reset(c.q.size(), 0xFF);
    q.Upload(c.q);
    k.Reset(std::max<size_t>(c.new_k.size(), 16), 0xFF);
    k.Upload(c.new_k);
    v.Reset(std::max<size_t>(c.new_v.size(), 16), 0xFF);
    v.Upload(c.new_v);
    sinks.Reset(std::max<size_t>(c.sinks.size(), 1) * 4, 0xFF);
    sinks.Upload(c.sinks);
  }
  bool GuardsIntact() const {
    bool intact = true;
    for (const DeviceBuffer* buffer :
         {&cache, &step, &rows, &tables, &q, &k, &v, &out, &lse, &sinks, &workspace}) {
      intact = intact && buffer->GuardsIntact();
    }
    return intact;
  }
};

double RoundingUnit(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return std::ldexp(1.0, -24);
    case DType::kBFloat16:
      return std::ldexp(1.0, -8);
    case DType::kFloat16:
      return std::ldexp(1.0, -11);
  }
  return 1.0;
}

// How far results may be from the reference. Scores are sums of fp32 products; 16-bit kernels round
// the probabilities and the result to the dtype.
struct Bounds {
  double unit;         // of the dtype, which probabilities are rounded to
  double result_unit;  // of the result
  double tiny;         // the absolute error of a rounded probability: fp16 has few small numbers
  double softcap;

  explicit Bounds(const PagedCase& c)
      : unit(RoundingUnit(c.shape.dtype)),
        result_unit(RoundingUnit(c.options.partial ? DType::kFloat32 : c.shape.dtype)),
        tiny(c.shape.dtype == DType::kFloat16 ? std::ldexp(1.0, -25) : 0.0),
        softcap(c.options.softcap) {}

  double Score(const ReferenceRow& row) const {
    return 1e-5 + 2e-6 * row.largest_product + 1e-6 * softcap;
  }
  double Out(const ReferenceRow& row, int64_t d) const {
    return 1.05 * (result_unit * std::fabs(row.out[d]) + unit * row.weighted_abs[d]) +
           2.0 * Score(row) * row.weighted_abs[d] + tiny * (1.0 + row.scaled_abs[d]) + 1e-30;
  }
  double Lse(const ReferenceRow& row) const { return Score(row) + 2e-6 * std::fabs(row.lse); }
};

// Compares results with the reference, on as many rows as kMostProducts allows.
class Judge {
 public:
  Judge(const PagedCase& c, const std::vector<char>& out, const std::vector<float>& lse)
      : case_(c), lse_(lse), bounds_(c) {
    const DType dtype = c.options.partial ? DType::kFloat32 : c.shape.dtype;
    out_.resize(out.size() / ElementBytes(dtype));
    ConvertToFloat(dtype, out.data(), out_.data(), static_cast<int64_t>(out_.size()));
  }

  // Empty, or what is wrong first.
  std::string Run(std::mt19937_64& random, Worst& worst) {
    struct Item {
      size_t row;
      int32_t query, head;
    };
    std::vector<Item> items;
    double products = 0.0;
    for (size_t r = 0; r < case_.rows.size(); ++r) {
      const CaseRow& row = case_.rows[r];
      for (int32_t i = 0; i < row.queries; ++i) {
        for (int32_t h = 0; h < case_.options.num_heads; ++h) items.push_back({r, i, h});
        products += double(row.length()) * (case_.shape.head_dim + case_.shape.head_dim_v) *
                    case_.options.num_heads;
      }
    }
    std::shuffle(items.begin(), items.end(), random);
    if (products > kMostProducts) {
      // Rows are of very different length: judge until the budget is spent.
      double spent = 0.0;
      size_t judged = 0;
      while (judged < items.size() && (spent < kMostProducts || judged < 16)) {
        spent += double(case_.rows[items[judged].row].length()) *
                 (case_.shape.head_dim + case_.shape.head_dim_v);
        ++judged;
      }
      items.resize(judged);
    }
    ParallelFor(static_cast<int64_t>(items.size()),
                [&](int64_t i) { JudgeRow(items[i].row, items[i].query, items[i].head); });
    if (error_.empty()) CheckWritten();
    worst.out = std::max(worst.out, worst_.out);
    worst.lse = std::max(worst.lse, worst_.lse);
    return error_;
  }

 private:
  void Fail(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = text;
  }

  void JudgeRow(size_t r, int32_t i, int32_t head) {
    const PagedCase& c = case_;
    const CaseRow& row = c.rows[r];
    const int64_t heads = c.options.num_heads;
    const int64_t dim = c.shape.head_dim, dim_v = c.shape.head_dim_v;
    const int64_t kv_heads = c.shape.num_kv_heads;
    const int64_t kv_head = head / (heads / kv_heads);
    const int64_t q_row = c.paged_rows[r].first_q + i;
    ReferenceQuery query;
    query.q = c.q_values.data() + (q_row * heads + head) * dim;
    query.length = row.length();
    query.position = int64_t{row.first_position()} + i;
    query.parts = c.shape.position_parts;
    query.part = c.shape.position_part;
    query.block_tokens = c.shape.block_tokens;
    query.causal = c.options.causal;
    query.window_left = c.options.window_left;
    query.softmax_scale = c.options.softmax_scale;
    query.softcap = c.options.softcap;
    query.has_sink = !c.sinks.empty() && !c.options.partial;
    if (query.has_sink) query.sink = c.sinks[head];
    const int64_t tokens = c.shape.block_tokens;
    const ReferenceRow expected =
        ComputeReference(query, dim, dim_v, [&](int64_t j, const float** k, const float** v) {
          const int64_t place = row.table[j / tokens] * tokens + j % tokens;
          *k = c.k_values.data() + (place * kv_heads + kv_head) * dim;
          *v = c.v_values.data() + (place * kv_heads + kv_head) * dim_v;
        });
    Worst worst;
    const double lse = lse_[head * int64_t{c.batch.max_total_q} + q_row];
    if (std::isinf(expected.lse) || std::isinf(lse)) {
      if (lse != expected.lse) {
        return Fail(absl::StrCat("row ", r, " query ", i, " head ", head, ": lse ", lse,
                                 ", expected ", expected.lse));
      }
    } else {
      worst.lse = std::fabs(lse - expected.lse) / bounds_.Lse(expected);
      if (!(worst.lse <= 1.0)) {
        return Fail(absl::StrCat("row ", r, " query ", i, " head ", head, ": lse ", lse,
                                 ", expected ", expected.lse));
      }
    }
    for (int64_t d = 0; d < dim_v; ++d) {
      const double out = out_[(q_row * heads + head) * dim_v + d];
      const double ratio = std::fabs(out - expected.out[d]) / bounds_.Out(expected, d);
      if (!(ratio <= 1.0)) {
        return Fail(absl::StrCat("row ", r, " query ", i, " head ", head, " column ", d, ": out ",
                                 out, ", expected ", expected.out[d], ", error / bound ", ratio));
      }
      worst.out = std::max(worst.out, ratio);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    worst_.out = std::max(worst_.out, worst.out);
    worst_.lse = std::max(worst_.lse, worst.lse);
  }

  // Every result of a query was written, and nothing else.
  void CheckWritten() {
    const PagedCase& c = case_;
    std::vector<bool> owned(c.batch.max_total_q);
    for (const PagedRow& row : c.paged_rows) {
      for (int32_t i = 0; i < row.q_tokens; ++i) owned[row.first_q + i] = true;
    }
    const int64_t row_elements = int64_t{c.options.num_heads} * c.shape.head_dim_v;
    for (int64_t q_row = 0; q_row < c.batch.max_total_q; ++q_row) {
      for (int64_t e = 0; e < row_elements; ++e) {
        if (std::isnan(out_[q_row * row_elements + e]) == owned[q_row]) {
          return Fail(absl::StrCat("q row ", q_row, " element ", e,
                                   owned[q_row] ? " is NaN" : " was written"));
        }
      }
      for (int64_t head = 0; head < c.options.num_heads; ++head) {
        if (std::isnan(lse_[head * c.batch.max_total_q + q_row]) == owned[q_row]) {
          return Fail(absl::StrCat("lse of q row ", q_row, " head ", head,
                                   owned[q_row] ? " is NaN" : " was written"));
        }
      }
    }
  }

  const PagedCase& case_;
  const std::vector<float>& lse_;
  std::vector<float> out_;
  Bounds bounds_;
  std::mutex mutex_;
  std::string error_;
  Worst worst_;
};

// Whether all planes are as they should be after the append.
bool CacheAsExpected(const PagedCase& c, const DeviceCase& on_device) {
  const std::vector<char> cache = on_device.cache.Download<char>();
  const int64_t plane_bytes = c.shape.plane_bytes();
  for (int32_t plane = 0; plane < c.shape.planes; ++plane) {
    const char* const found = cache.data() + plane * plane_bytes;
    if (plane == c.plane) {
      if (std::memcmp(found, c.k_after.data(), c.k_after.size()) != 0) return false;
      if (std::memcmp(found + c.k_after.size(), c.v_after.data(), c.v_after.size()) != 0) {
        return false;
      }
    } else if (std::any_of(found, found + plane_bytes,
                           [](char x) { return x != static_cast<char>(0xFF); })) {
      return false;
    }
  }
  return true;
}

// How a case ran.
struct Served {
  std::string kernels;
  bool fetched = false;  // also with a fetched step
  bool signals = false;  // whose end was signalled
};

// Empty, or what is wrong.
std::string RunCase(const PagedCase& c, const DeviceInfo& device, KernelChoice choice,
                    DeviceCase& on_device, cudaStream_t stream, std::mt19937_64& random,
                    Worst& worst, Served& served) {
  const int64_t workspace_bytes =
      PagedAttention::WorkspaceBytes(c.shape, c.options, c.batch, device, choice);
  on_device.Upload(c);
  on_device.workspace.Reset(workspace_bytes, 0);
  auto attention =
      PagedAttention::Create(c.shape, c.options, c.batch, on_device.buffers(c), device, choice);
  if (!attention.ok()) return std::string(attention.status().message());
  served.kernels = (*attention)->kernels();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const absl::Status captured = (*attention)->Enqueue(stream);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  if (!captured.ok()) return std::string(captured.message());
  Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  // A replay without rows changes nothing.
  Check(cudaGraphLaunch(executable, stream), "replay");
  Check(cudaStreamSynchronize(stream), "empty replay");

  on_device.UploadStep(c);
  if (absl::Status status = (*attention)->Enqueue(stream); !status.ok()) {
    return std::string(status.message());
  }
  Check(cudaStreamSynchronize(stream), "kernels");
  const std::vector<char> out = on_device.out.Download<char>();
  const std::vector<float> lse = on_device.lse.Download<float>();
  std::string error;
  if (!on_device.GuardsIntact()) error = "memory around a buffer was written";
  if (error.empty() && !CacheAsExpected(c, on_device)) error = "the cache differs after the append";
  if (error.empty()) error = Judge(c, out, lse).Run(random, worst);

  if (error.empty()) {
    on_device.UploadCache(c);
    on_device.PoisonResults(c);
    Check(cudaGraphLaunch(executable, stream), "replay");
    Check(cudaStreamSynchronize(stream), "replay");
    const std::vector<float> replayed = on_device.lse.Download<float>();
    if (on_device.out.Download<char>() != out ||
        std::memcmp(replayed.data(), lse.data(), lse.size() * sizeof(float)) != 0) {
      error = "a replay gave other bits";
    }
  }
  if (error.empty()) {  // the cache holds the entries: reading alone gives the same
    on_device.PoisonResults(c);
    Check((*attention)->EnqueueRead(stream));
    Check(cudaStreamSynchronize(stream), "read");
    if (on_device.out.Download<char>() != out) error = "reading alone gave other bits";
  }
  if (error.empty() && on_device.fetched.Lay(c)) {
    served.fetched = true;
    error = on_device.fetched.Run(
        c, on_device.buffers(c), device, choice, stream, out, lse,
        [&] { on_device.UploadCache(c); }, [&] { return CacheAsExpected(c, on_device); },
        &served.signals);
  }
  Check(cudaGraphExecDestroy(executable), "graph");
  Check(cudaGraphDestroy(graph), "graph");
  return error;
}

// Counts the features that the cases of a run had. A complete run must have each at least once.
class Coverage {
 public:
  void Add(const PagedCase& c, const Served& served) {
    const std::string& kernels = served.kernels;
    const auto count = [&](bool met, const std::string& name) { counts_[name] += met ? 1 : 0; };
    count(true, kernels);
    count(served.fetched, absl::StrCat("fetched by ", kernels));
    count(served.signals, "signalled ends");
    count(true, absl::StrCat(kernels, " ", DTypeName(c.shape.dtype)));
    count(true, absl::StrCat("blocks of ", c.shape.block_tokens));
    count(c.options.window_left >= 0, "window");
    count(c.options.softcap > 0.0f, "softcap");
    count(!c.sinks.empty(), "sinks");
    count(c.options.partial, "partial");
    count(!c.options.causal, "full");
    count(c.shape.head_dim != c.shape.head_dim_v, "Dv != D");
    count(c.shape.k_row_elements > 0, "rows wider than the heads");
    const bool parted = c.shape.position_parts > 1;
    bool empty = false, several = false, prefill = false, without_keys = false, long_row = false;
    for (const CaseRow& row : c.rows) {
      empty |= row.length() == 0;
      several |= row.queries > 1 && row.queries <= kMaxDecodeQueries;
      prefill |= row.queries > kMaxDecodeQueries;
      without_keys |= row.queries > row.sequence_length;
      long_row |= row.length() >= 100000;
    }
    count(empty, "empty sequence");
    count(several, "several queries in a decode");
    count(prefill, absl::StrCat("prefill by ", kernels));
    count(without_keys, "queries without keys");
    count(long_row, "100,000 entries and more");
    count(c.rows.size() > 100, "more than 100 rows");
    count(parted && several, absl::StrCat("position parts, several queries by ", kernels));
    count(parted && prefill, absl::StrCat("position parts, prefill by ", kernels));
    count(parted && c.options.window_left >= 0,
          absl::StrCat("position parts, window by ", kernels));
    count(MergesInGroups(c), absl::StrCat("pieces merged in groups by ", kernels));
    count(parted && MergesInGroups(c),
          absl::StrCat("position parts, pieces merged in groups by ", kernels));
    for (const int dim : {64, 96, 128, 192, 256}) {
      const int larger = std::max(c.shape.head_dim, c.shape.head_dim_v);
      count(larger <= dim && larger > dim - 64, absl::StrCat(kernels, " head dims about ", dim));
    }
  }
  // Prints all; false if something was never met.
  bool Print() const {
    bool all = true;
    for (const auto& [name, count] : counts_) {
      std::printf("  %s: %d\n", name.c_str(), count);
      all = all && count > 0;
    }
    return all;
  }

 private:
  // Whether both families merge the pieces of the case's only unit in groups: thread blocks
  // outnumber kv heads, and each has a tile.
  static bool MergesInGroups(const PagedCase& c) {
    if (c.rows.size() != 1 || c.options.window_left >= 0 || c.batch.splits > 0) return false;
    const int64_t packed_rows = c.rows[0].queries * c.options.num_heads / c.shape.num_kv_heads;
    return c.shape.num_kv_heads <= 2 && c.rows[0].length() >= 100000 && packed_rows >= 8 &&
           packed_rows <= 16;
  }

  std::map<std::string, int> counts_;
};

CaseKind KindOf(const Arguments& arguments, int index) {
  if (arguments.small) return CaseKind::kSmall;
  if (index % 40 == 39) return CaseKind::kLong;
  if (index % 40 == 20) return CaseKind::kGrouped;  // even: by both families
  if (index % 10 == 7) return CaseKind::kManyRows;
  return index % 3 == 2 ? CaseKind::kPrefill : CaseKind::kDecode;
}

int Main(const Arguments& arguments) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "device");
  const DeviceInfo device{properties.multiProcessorCount, properties.major,
                          static_cast<int>(properties.sharedMemPerBlockOptin)};
  std::printf("%s, seed %llu\n", properties.name, static_cast<unsigned long long>(arguments.seed));
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "stream");
  DeviceCase on_device;
  Coverage coverage;
  std::map<std::string, Worst> worst;
  int failures = 0, runs = 0;
  for (int i = 0; i < arguments.cases; ++i) {
    if (arguments.only >= 0 && i != arguments.only) continue;
    std::mt19937_64 random(arguments.seed + i);
    const PagedCase c = DrawCase(KindOf(arguments, i), random);
    std::vector<KernelChoice> choices;
    if (!arguments.portable) choices.push_back(KernelChoice::kAutomatic);
    if (arguments.portable || i % 2 == 0) choices.push_back(KernelChoice::kPortable);
    if (arguments.progress) {
      std::printf("case %d: %s\n", i, c.Describe().c_str());
      std::fflush(stdout);
    }
    for (const KernelChoice choice : choices) {
      Served served;
      Worst of_case;
      const std::string error =
          RunCase(c, device, choice, on_device, stream, random, of_case, served);
      ++runs;
      coverage.Add(c, served);
      Worst& of_kind = worst[absl::StrCat(served.kernels, " ", DTypeName(c.shape.dtype))];
      of_kind.out = std::max(of_kind.out, of_case.out);
      of_kind.lse = std::max(of_kind.lse, of_case.lse);
      if (error.empty()) continue;
      if (++failures <= kMostFailures) {
        std::printf("FAILED --only=%d, %s: %s\n  %s\n", i, served.kernels.c_str(), error.c_str(),
                    c.Describe().c_str());
        std::fflush(stdout);
      }
    }
  }
  for (const auto& [name, ratios] : worst) {
    std::printf("%s: worst error / bound of out %.3f, of lse %.3f\n", name.c_str(), ratios.out,
                ratios.lse);
  }
  const bool covered = coverage.Print();
  const bool complete =
      arguments.cases >= 1000 && !arguments.portable && !arguments.small && arguments.only < 0;
  if (complete && !covered) std::printf("FAILED: a case that is listed with 0 was never drawn\n");
  std::printf("%d cases, %d runs, %d failed\n", arguments.cases, runs, failures);
  return failures == 0 && (covered || !complete) ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::worker::cuda::paged::check

int main(int argc, char** argv) {
  namespace check = ringattn::worker::cuda::paged::check;
  return check::Main(check::Parse(argc, argv));
}
