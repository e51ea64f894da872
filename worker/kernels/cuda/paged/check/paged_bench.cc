// Times the paged kernels on a GPU by replaying captured graphs. bf16; head_dim 128 unless named.
//
//   paged_bench [--only=decode|ranks|parts|batch|small|prefill] [--rounds=N]
//
// Prints lines of comma-separated values: case, measure, value, unit. The bench runs calls that it
// compares in turns and reports medians. It verifies the contiguous forward and no other call: run
// paged_check first.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/paged/check/bench_kernels.h"
#include "worker/kernels/cuda/paged/check/contiguous_forward.h"
#include "worker/kernels/cuda/paged/check/device_buffer.h"
#include "worker/kernels/cuda/paged/paged_attention.h"

namespace ringattn::worker::cuda::paged::check {
namespace {

constexpr int32_t kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr int64_t kTokenBytes = int64_t{2} * kKvHeads * kDim * 2;  // K and V of one entry

cudaStream_t g_stream;
DeviceInfo g_device;
int g_rounds = 9;

void Report(const std::string& name, const std::string& measure, double value, const char* unit) {
  std::printf("%s,%s,%.5g,%s\n", name.c_str(), measure.c_str(), value, unit);
  std::fflush(stdout);
}

enum class Order { kAscending, kShuffled };

struct BenchRow {
  int64_t length = 0;  // append included
  int32_t queries = 1;
  int32_t append = 1;
};

// One graph that attends once on each of `planes` planes of a cache, all with the same rows.
class PagedRun {
 public:
  struct Settings {
    int32_t heads = kHeads, kv_heads = kKvHeads, dim = kDim;
    int32_t block_tokens = 64;
    Order order = Order::kAscending;
    int32_t planes = 1;
    bool append = true;
    int32_t splits = 0;
    int32_t parts = 1;  // the run is part 0 of so many, and lengths are the part's
    KernelChoice choice = KernelChoice::kAutomatic;
  };

  // `cache`: memory for the planes, filled.
  PagedRun(const Settings& settings, std::vector<BenchRow> rows, const DeviceBuffer& cache)
      : settings_(settings), rows_(std::move(rows)) {
    shape_.num_kv_heads = settings.kv_heads;
    shape_.head_dim = shape_.head_dim_v = settings.dim;
    shape_.block_tokens = settings.block_tokens;
    shape_.planes = settings.planes;
    shape_.position_parts = settings.parts;
    int64_t blocks = 0, total_q = 0, total_append = 0;
    int32_t most_q = 1, most_append = 0;
    for (const BenchRow& row : rows_) {
      blocks += (row.length - 1) / settings.block_tokens + 1;
      total_q += row.queries;
      total_append += row.append;
      most_q = std::max(most_q, row.queries);
      most_append = std::max(most_append, row.append);
    }
    shape_.blocks = std::max<int64_t>(blocks, 1);
    if (shape_.bytes() > static_cast<int64_t>(cache.bytes())) {
      std::fprintf(stderr, "FATAL the cache of a case is larger than the bench's\n");
      std::exit(2);
    }
    options_.num_heads = settings.heads;
    options_.partial = settings.parts > 1;
    options_.softmax_scale = 1.0f / std::sqrt(static_cast<float>(settings.dim));
    batch_.max_rows = static_cast<int32_t>(std::max<size_t>(rows_.size(), 1));
    batch_.max_q_tokens = most_q;
    batch_.max_total_q = static_cast<int32_t>(std::max<int64_t>(total_q, 1));
    batch_.max_append_tokens = most_append;
    batch_.splits = settings.splits;

    const int64_t q_elements = int64_t{batch_.max_total_q} * settings.heads * settings.dim;
    const int64_t k_elements =
        std::max<int64_t>(total_append, 1) * settings.kv_heads * settings.dim;
    q_.Reserve(q_elements * 2);
    out_.Reserve(q_elements * 4);
    k_.Reserve(k_elements * 2);
    v_.Reserve(k_elements * 2);
    Check(FillRandom(q_.get<void>(), q_elements, 11, g_stream), "fill");
    Check(FillRandom(k_.get<void>(), k_elements, 12, g_stream), "fill");
    Check(FillRandom(v_.get<void>(), k_elements, 13, g_stream), "fill");
    lse_.Reserve(int64_t{settings.heads} * batch_.max_total_q * 4);
    workspace_.Reset(
        PagedAttention::WorkspaceBytes(shape_, options_, batch_, g_device, settings.choice), 0);
    rows_buffer_.Reserve(batch_.max_rows * sizeof(PagedRow));
    tables_.Reserve(shape_.blocks * 4);
    steps_.Reserve(settings.planes * sizeof(PagedStep));
    UploadStep();

    Buffers buffers;
    buffers.cache = cache.get<void>();
    buffers.rows = rows_buffer_.get<PagedRow>();
    buffers.tables = tables_.get<int32_t>();
    buffers.q = q_.get<void>();
    buffers.k = k_.get<void>();
    buffers.v = v_.get<void>();
    buffers.out = out_.get<void>();
    buffers.lse = lse_.get<float>();
    buffers.workspace = workspace_.get<void>();
    for (int32_t plane = 0; plane < settings.planes; ++plane) {
      buffers.step = steps_.get<PagedStep>() + plane;
      auto attention =
          PagedAttention::Create(shape_, options_, batch_, buffers, g_device, settings.choice);
      Check(attention.status());
      planes_.push_back(*std::move(attention));
    }
    Check(cudaStreamSynchronize(g_stream), "set-up");
    cudaGraph_t graph;
    Check(cudaStreamBeginCapture(g_stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (const auto& attention : planes_) {
      Check(settings.append ? attention->Enqueue(g_stream) : attention->EnqueueRead(g_stream));
    }
    Check(cudaStreamEndCapture(g_stream, &graph), "capture");
    Check(cudaGraphInstantiate(&executable_, graph, 0), "instantiate");
    Check(cudaGraphDestroy(graph), "graph");
  }
  ~PagedRun() { cudaGraphExecDestroy(executable_); }
  PagedRun(const PagedRun&) = delete;
  PagedRun& operator=(const PagedRun&) = delete;

  void Launch() const { Check(cudaGraphLaunch(executable_, g_stream), "replay"); }

  // Other rows of the same numbers of queries and new entries, or fewer: the next replays'.
  void SetRows(std::vector<BenchRow> rows) {
    rows_ = std::move(rows);
    UploadStep();
  }
  int64_t bytes() const {
    int64_t keys = 0;
    for (const BenchRow& row : rows_) keys += row.length;
    return keys * settings_.kv_heads * settings_.dim * 4 * settings_.planes;
  }
  const void* q() const { return q_.get<void>(); }

 private:
  void UploadStep() {
    std::vector<int32_t> table(shape_.blocks);
    std::iota(table.begin(), table.end(), 0);
    if (settings_.order == Order::kShuffled) {
      std::shuffle(table.begin(), table.end(), std::mt19937(7));
    }
    tables_.Upload(table);
    std::vector<PagedRow> rows;
    PagedRow next;
    for (const BenchRow& row : rows_) {
      next.q_tokens = row.queries;
      next.append_tokens = row.append;
      next.keep_length = static_cast<int32_t>(row.length - row.append);
      next.first_position = static_cast<int32_t>(row.length * settings_.parts - row.queries);
      rows.push_back(next);
      next.first_q += row.queries;
      next.first_append += row.append;
      next.table += static_cast<int32_t>((row.length - 1) / settings_.block_tokens + 1);
    }
    rows_buffer_.Upload(rows);
    std::vector<PagedStep> steps(settings_.planes);
    for (int32_t plane = 0; plane < settings_.planes; ++plane) {
      steps[plane].num_rows = static_cast<int32_t>(rows.size());
      steps[plane].plane = plane;
    }
    steps_.Upload(steps);
  }

  Settings settings_;
  std::vector<BenchRow> rows_;
  CacheShape shape_;
  AttentionOptions options_;
  BatchClass batch_;
  DeviceBuffer q_, k_, v_, out_, lse_, workspace_, rows_buffer_, tables_, steps_;
  std::vector<std::unique_ptr<PagedAttention>> planes_;
  cudaGraphExec_t executable_ = nullptr;
};

// Medians of the time of one call each, in us: all in turns, several calls between two events where
// they are short.
std::vector<double> TimeInTurns(const std::vector<std::function<void()>>& calls) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  const auto time = [&](const std::function<void()>& call, int repeats) {
    Check(cudaEventRecord(begin, g_stream), "event");
    for (int i = 0; i < repeats; ++i) call();
    Check(cudaEventRecord(end, g_stream), "event");
    Check(cudaEventSynchronize(end), "event");
    float ms;
    Check(cudaEventElapsedTime(&ms, begin, end), "event");
    return 1e3 * ms / repeats;
  };
  std::vector<int> repeats;
  for (const auto& call : calls) {
    time(call, 2);
    repeats.push_back(std::clamp(static_cast<int>(4000.0 / time(call, 2)), 1, 200));
  }
  std::vector<std::vector<double>> samples(calls.size());
  for (int round = 0; round < g_rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) samples[i].push_back(time(calls[i], repeats[i]));
  }
  std::vector<double> medians;
  for (auto& of_call : samples) {
    std::nth_element(of_call.begin(), of_call.begin() + of_call.size() / 2, of_call.end());
    medians.push_back(of_call[of_call.size() / 2]);
  }
  Check(cudaEventDestroy(begin), "event");
  Check(cudaEventDestroy(end), "event");
  return medians;
}

// The host's part of a step over a step ring, in which the device is idle.
constexpr uint64_t kIdleNanoseconds = 30'000;

// Median time of one call, in us, each after the device was idle for as long as between two steps.
// Calls in a row overlap: the next one's blocks start while the last one's end.
double TimeAfterIdle(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  std::vector<double> samples;
  for (int i = 0; i < 20 * g_rounds; ++i) {
    // The host enqueues the rest during the pause, so that its time is not measured.
    Check(Pause(kIdleNanoseconds, g_stream), "pause");
    Check(cudaEventRecord(begin, g_stream), "event");
    call();
    Check(cudaEventRecord(end, g_stream), "event");
    Check(cudaEventSynchronize(end), "event");
    float ms;
    Check(cudaEventElapsedTime(&ms, begin, end), "event");
    samples.push_back(1e3 * ms);
  }
  Check(cudaEventDestroy(begin), "event");
  Check(cudaEventDestroy(end), "event");
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

double GigabytesPerSecond(double bytes, double us) { return bytes / us * 1e-3; }

// One sequence with several kinds of tables, compared with contiguous keys and a device copy.
void BenchDecode(const DeviceBuffer& cache) {
  for (const int64_t length : {int64_t{131072}, int64_t{1048576}}) {
    const auto run = [&](int32_t block_tokens, Order order, bool append) {
      PagedRun::Settings settings;
      settings.block_tokens = block_tokens;
      settings.order = order;
      settings.append = append;
      return std::make_unique<PagedRun>(settings, std::vector<BenchRow>{{length, 1, 1}}, cache);
    };
    const auto contiguous = run(256, Order::kAscending, true);
    const auto ascending = run(64, Order::kAscending, true);
    const auto shuffled = run(64, Order::kShuffled, true);
    const auto small = run(16, Order::kShuffled, true);
    const auto read = run(64, Order::kAscending, false);
    PagedRun::Settings settings;
    settings.choice = KernelChoice::kPortable;
    const PagedRun portable(settings, {{length, 1, 1}}, cache);
    const double bytes = static_cast<double>(length * kTokenBytes);
    const auto copy = [&] {
      Check(cudaMemcpyAsync(cache.get<char>() + length * kTokenBytes, cache.get<char>(),
                            length * kTokenBytes / 2, cudaMemcpyDeviceToDevice, g_stream),
            "copy");
    };
    const std::vector<double> us = TimeInTurns(
        {[&] { contiguous->Launch(); }, [&] { ascending->Launch(); }, [&] { shuffled->Launch(); },
         [&] { small->Launch(); }, [&] { read->Launch(); }, copy, [&] { portable.Launch(); }});
    const std::string name = absl::StrCat("decode of ", length, " keys");
    const char* const kinds[] = {"contiguous",
                                 "blocks of 64 ascending",
                                 "blocks of 64 shuffled",
                                 "blocks of 16 shuffled",
                                 "blocks of 64 without append",
                                 "device copy",
                                 "portable kernels"};
    for (size_t i = 0; i < us.size(); ++i) {
      Report(name, kinds[i], us[i], "us");
      Report(name, kinds[i], GigabytesPerSecond(bytes, us[i]), "GB/s");
    }
    Report(name, "blocks of 64 ascending / contiguous", us[0] / us[1], "rate");
    Report(name, "blocks of 64 shuffled / contiguous", us[0] / us[2], "rate");
    Report(name, "blocks of 64 ascending / device copy", us[5] / us[1], "rate");
    Report(name, "blocks of 64 shuffled / device copy", us[5] / us[2], "rate");
    Report(name, "blocks of 16 shuffled / blocks of 64 ascending", us[1] / us[3], "rate");
  }
}

// One sequence on the ranks of caches that divide 32 query heads and 8 kv heads.
void BenchRanks(const DeviceBuffer& cache) {
  for (const int64_t length : {16384, 131072, 1048576}) {
    for (const int32_t ranks : {1, 2, 4, 8}) {
      PagedRun::Settings settings;
      settings.heads = kHeads / ranks;
      settings.kv_heads = kKvHeads / ranks;
      const PagedRun run(settings, {{length + 1, 1, 1}}, cache);
      const double us = TimeInTurns({[&] { run.Launch(); }})[0];
      const std::string name = absl::StrCat("decode of ", length, " keys, ", ranks, " ranks");
      Report(name, "append and attention", us, "us");
      Report(name, "append and attention after idle", TimeAfterIdle([&] { run.Launch(); }), "us");
    }
  }
}

// One kv head of a sequence on the ranks of caches with several position parts.
void BenchParts(const DeviceBuffer& cache) {
  for (const int64_t length : {16384, 131072, 1048576}) {
    for (const int32_t queries : {1, 2, 8, 64, 2048}) {
      if (queries > kMaxDecodeQueries && length < 1048576) continue;
      for (const int32_t parts : {1, 2, 4, 8}) {
        PagedRun::Settings settings;
        settings.kv_heads = 1;
        settings.order = Order::kShuffled;
        settings.parts = parts;
        const PagedRun run(settings, {{length / parts, queries, (queries - 1) / parts + 1}}, cache);
        const double us = TimeInTurns({[&] { run.Launch(); }})[0];
        const std::string name =
            absl::StrCat(queries, " queries of 32 heads and ", length, " keys, ", parts, " parts");
        Report(name, "append and attention", us, "us");
        Report(name, "K and V", GigabytesPerSecond(run.bytes(), us), "GB/s");
      }
    }
  }
}

// 64 sequences of 16 to 1M entries, compared with one sequence of equal total length.
void BenchBatch(const DeviceBuffer& cache) {
  std::vector<BenchRow> rows;
  int64_t total = 0;
  for (int i = 0; i < 64; ++i) {
    const double length = 16.0 * std::pow(1048576.0 / 16.0, i / 63.0);
    rows.push_back({static_cast<int64_t>(std::lround(length)), 1, 1});
    total += rows.back().length;
  }
  std::shuffle(rows.begin(), rows.end(), std::mt19937(3));
  PagedRun::Settings settings;
  settings.order = Order::kShuffled;
  const PagedRun batch(settings, rows, cache);
  const PagedRun one(settings, {{total, 1, 1}}, cache);
  const std::vector<double> us = TimeInTurns({[&] { batch.Launch(); }, [&] { one.Launch(); }});
  const std::string name = "64 sequences of 16 to 1048576 keys";
  Report(name, "batch", us[0], "us");
  Report(name, "batch", GigabytesPerSecond(batch.bytes(), us[0]), "GB/s");
  Report(name, "one sequence of as many bytes", us[1], "us");
  Report(name, "batch / one sequence", us[1] / us[0], "rate");
  // Equal lengths, by batch size: K and V of 8 GiB or less.
  for (const int32_t size : {1, 4, 16, 64, 256}) {
    for (const int64_t length : {int64_t{2048}, int64_t{8192}, int64_t{32768}, int64_t{131072}}) {
      if (size * length * kTokenBytes > (int64_t{24} << 30)) continue;
      PagedRun::Settings of_size;
      of_size.order = Order::kShuffled;
      of_size.planes = static_cast<int32_t>(
          std::clamp<int64_t>((int64_t{512} << 20) / (size * length * kTokenBytes), 1, 16));
      const PagedRun run(of_size, std::vector<BenchRow>(size, {length, 1, 1}), cache);
      const double time = TimeInTurns({[&] { run.Launch(); }})[0];
      const std::string case_name = absl::StrCat("batch ", size, " of ", length, " keys");
      Report(case_name, "one layer", time / of_size.planes, "us");
      Report(case_name, "K and V", GigabytesPerSecond(run.bytes(), time), "GB/s");
    }
  }
}

// The cost of a launch, and other shapes.
void BenchSmall(const DeviceBuffer& cache) {
  PagedRun::Settings settings;
  settings.order = Order::kShuffled;
  settings.planes = 16;
  PagedRun run(settings, {{16384, 1, 1}}, cache);
  settings.append = false;
  PagedRun read(settings, {{16384, 1, 1}}, cache);
  for (const int64_t length : {0, 16, 512, 2048, 16384}) {
    std::vector<BenchRow> rows;
    if (length > 0) rows.push_back({length, 1, 1});
    run.SetRows(rows);
    read.SetRows(rows);
    const std::vector<double> us = TimeInTurns({[&] { run.Launch(); }, [&] { read.Launch(); }});
    const std::string name = absl::StrCat("one layer, one sequence of ", length, " keys");
    Report(name, "append and attention", us[0] / settings.planes, "us");
    Report(name, "attention", us[1] / settings.planes, "us");
  }
  struct Other {
    int32_t heads, kv_heads, dim, queries;
  };
  for (const Other& other : std::vector<Other>{{32, 8, 128, 4},
                                               {32, 8, 128, 16},
                                               {32, 8, 128, 64},
                                               {8, 1, 128, 1},
                                               {4, 1, 128, 1},
                                               {32, 32, 128, 1},
                                               {64, 8, 64, 1},
                                               {32, 8, 96, 1},
                                               {32, 8, 192, 1},
                                               {32, 8, 256, 1}}) {
    PagedRun::Settings of_shape;
    of_shape.heads = other.heads;
    of_shape.kv_heads = other.kv_heads;
    of_shape.dim = other.dim;
    of_shape.order = Order::kShuffled;
    const int64_t length = 131072 * 8 / other.kv_heads;
    const PagedRun of_other(of_shape, {{length, other.queries, other.queries}}, cache);
    const double us = TimeInTurns({[&] { of_other.Launch(); }})[0];
    const std::string name = absl::StrCat("heads ", other.heads, "/", other.kv_heads, " d",
                                          other.dim, " queries ", other.queries, " keys ", length);
    Report(name, "append and attention", us, "us");
    Report(name, "K and V", GigabytesPerSecond(of_other.bytes(), us), "GB/s");
  }
}

// 256K tokens in chunks of 8K, compared with one Forward of 256K.
void BenchPrefill(const DeviceBuffer& cache) {
  constexpr int64_t kTokens = 262144, kChunk = 8192;
  DeviceBuffer q, out, lse;
  q.Reserve(kTokens * kHeads * kDim * 2);
  out.Reserve(kTokens * kHeads * kDim * 2);
  lse.Reserve(kTokens * kHeads * 4);
  Check(FillRandom(q.get<void>(), kTokens * kHeads * kDim, 21, g_stream), "fill");
  const ContiguousForwardRun whole(kTokens, kHeads, kKvHeads,
                                   1.0f / std::sqrt(static_cast<float>(kDim)), q.get<void>(),
                                   cache.get<char>(), cache.get<char>() + kTokens * kTokenBytes / 2,
                                   out.get<void>(), lse.get<float>(), g_device.sm_count);
  whole.Verify(g_stream);
  const int rounds = std::exchange(g_rounds, 3);
  double forward = 0.0;
  for (const int32_t block_tokens : {64, 256, 16}) {
    PagedRun::Settings settings;
    settings.block_tokens = block_tokens;
    settings.order = Order::kShuffled;
    PagedRun run(settings, {{kTokens, kChunk, kChunk}}, cache);
    double sum = 0.0;
    const std::string name = absl::StrCat("prefill of ", kTokens, " in chunks of ", kChunk,
                                          ", blocks of ", block_tokens);
    for (int64_t begin = 0; begin < kTokens; begin += kChunk) {
      run.SetRows({{begin + kChunk, kChunk, kChunk}});
      const double us = TimeInTurns({[&] { run.Launch(); }})[0];
      sum += us;
      if (begin == 0 || begin == kTokens / 2 || begin + kChunk == kTokens) {
        const double flops = 4.0 * kHeads * kDim * kChunk * (begin + kChunk / 2.0);
        Report(name, absl::StrCat("chunk at ", begin), flops / us * 1e-6, "TFLOP/s");
      }
    }
    forward = TimeInTurns({[&] { whole.Launch(g_stream); }})[0];
    Report(name, "sum of all chunks", sum, "us");
    Report(name, "one Forward", forward, "us");
    Report(name, "sum of all chunks / one Forward", sum / forward, "time");
  }
  const double flops = 2.0 * kHeads * kDim * static_cast<double>(kTokens) * kTokens;
  Report("one Forward of 262144", "contiguous kernel", flops / forward * 1e-6, "TFLOP/s");
  g_rounds = rounds;
}

int Main(int argc, char** argv) {
  std::string only;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--only=", 7) == 0) {
      only = argv[i] + 7;
    } else if (std::strncmp(argv[i], "--rounds=", 9) == 0) {
      g_rounds = std::max(1, std::atoi(argv[i] + 9));
    } else {
      std::fprintf(stderr,
                   "paged_bench [--only=decode|ranks|parts|batch|small|prefill] [--rounds=N]\n");
      return 2;
    }
  }
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "device");
  g_device = {properties.multiProcessorCount, properties.major,
              static_cast<int>(properties.sharedMemPerBlockOptin)};
  Check(cudaStreamCreate(&g_stream), "stream");
  DeviceBuffer cache;  // for 64 sequences of up to 1M entries
  cache.Reserve(int64_t{6600000} * kTokenBytes);
  Check(FillRandom(cache.get<void>(), static_cast<int64_t>(cache.bytes() / 2), 1, g_stream),
        "fill");
  const auto wanted = [&](const char* name) { return only.empty() || only == name; };
  if (wanted("decode")) BenchDecode(cache);
  if (wanted("ranks")) BenchRanks(cache);
  if (wanted("parts")) BenchParts(cache);
  if (wanted("batch")) BenchBatch(cache);
  if (wanted("small")) BenchSmall(cache);
  if (wanted("prefill")) BenchPrefill(cache);
  return 0;
}

}  // namespace
}  // namespace ringattn::worker::cuda::paged::check

int main(int argc, char** argv) { return ringattn::worker::cuda::paged::check::Main(argc, argv); }
