// Decode calls of a K/V cache on GPU 0, without a transport: one row of one query against one long
// sequence in bf16. Run kv_gpu_sweep first: nothing is verified here.
//
//   kv_gpu_bench --lengths=16384,131072,1048576
//
// Prints lines of comma-separated values: case, measure, value, unit.
//   call   time of DeviceKvCache::Run: copies, append, attention, wait for the result
//   rows   time of DeviceKvCache::SetRows, once per step
//   bound  time to copy the call's tensors to the device, replay a graph of one empty kernel and
//          wait for its end
//   doorbell  the same, requested by another thread: it writes the call's tensors to shared memory,
//             stores a word, reads the other thread's word until it has changed, and reads the
//             result. The bound of a layer call through a step ring without the kernel's time.
//   doorbell less a wait of N us  the same around a kernel that waits for N us (--waits_us), less
//             these. Code that waits for long runs slower afterwards, so this is the bound of a
//             call whose kernels take N us.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/step_ring/shared_word.h"
#include "tests/bench/empty_kernel.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/cuda_kv_caches.h"

ABSL_FLAG(std::vector<std::string>, lengths,
          std::vector<std::string>({"16384", "131072", "1048576"}), "entries of the sequence");
ABSL_FLAG(int, heads, 32, "query heads");
ABSL_FLAG(int, kv_heads, 8, "kv heads");
ABSL_FLAG(int, head_dim, 128, "dim of a head");
ABSL_FLAG(int, block_tokens, 64, "entries of a block");
ABSL_FLAG(int, layers, 2, "layers of a step");
ABSL_FLAG(std::vector<std::string>, waits_us, {}, "durations of the kernel within the doorbell");
ABSL_FLAG(int, steps, 2000, "timed steps of each length");

namespace ringattn::worker {
namespace {

using Clock = std::chrono::steady_clock;

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}
void Require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

double MicrosSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

void Report(const std::string& name, const std::string& measure, std::vector<double> us) {
  std::sort(us.begin(), us.end());
  for (const auto& [quantile, q] : {std::pair("p50", 0.5), std::pair("p99", 0.99)}) {
    const size_t index = std::min(us.size() - 1, static_cast<size_t>(q * us.size()));
    std::printf("%s,%s %s,%.2f,us\n", name.c_str(), measure.c_str(), quantile, us[index]);
  }
  std::fflush(stdout);
}

std::string RandomBf16(int64_t elements, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(elements * 2, 0);
  for (int64_t i = 0; i < elements; ++i) {  // magnitudes from 2^-3 to 2
    bytes[2 * i] = static_cast<char>(random());
    bytes[2 * i + 1] = static_cast<char>((random() & 0x80) | (random() % 3 == 0 ? 0x3F : 0x3E));
  }
  return bytes;
}

// A graph of one kernel, which is empty or waits for `wait_us`, and pinned memory of `bytes` that
// is copied to the device before it.
class EmptyLaunch {
 public:
  explicit EmptyLaunch(int64_t bytes, double wait_us = 0) : bytes_(bytes) {
    Require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Require(cudaHostAlloc(&host_, bytes, cudaHostAllocDefault));
    Require(cudaMalloc(&device_, bytes));
    Require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    auto nanoseconds = static_cast<unsigned long long>(wait_us * 1e3);
    void* parameters[] = {&nanoseconds};
    Require(wait_us == 0
                ? cudaLaunchKernel(EmptyKernel(), dim3(1), dim3(32), nullptr, 0, stream_)
                : cudaLaunchKernel(WaitingKernel(), dim3(1), dim3(1), parameters, 0, stream_));
    Require(cudaStreamEndCapture(stream_, &graph_));
    Require(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~EmptyLaunch() {
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGraphDestroy(graph_);
    (void)cudaFree(device_);
    (void)cudaFreeHost(host_);
    (void)cudaStreamDestroy(stream_);
  }
  EmptyLaunch(const EmptyLaunch&) = delete;
  EmptyLaunch& operator=(const EmptyLaunch&) = delete;

  int64_t bytes() const { return bytes_; }
  void* host() const { return host_; }

  // Returns when the kernel has ended.
  void Run(bool copies) const {
    if (copies) {
      Require(cudaMemcpyAsync(device_, host_, bytes_, cudaMemcpyHostToDevice, stream_));
    }
    Require(cudaGraphLaunch(executable_, stream_));
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady) state = cudaStreamQuery(stream_);
    Require(state);
  }

 private:
  const int64_t bytes_;
  cudaStream_t stream_ = nullptr;
  void* host_ = nullptr;
  void* device_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

class Bench {
 public:
  explicit Bench(Device* device) : device_(device) {
    shape_.dtype = DType::kBFloat16;
    shape_.block_tokens = absl::GetFlag(FLAGS_block_tokens);
    DeviceKvGroup group;
    group.layers = absl::GetFlag(FLAGS_layers);
    group.num_heads = absl::GetFlag(FLAGS_heads);
    group.num_kv_heads = absl::GetFlag(FLAGS_kv_heads);
    group.head_dim = group.head_dim_v = absl::GetFlag(FLAGS_head_dim);
    group.softmax_scale = 0.08f;
    row_ = group.num_kv_heads * group.head_dim;
    for (int64_t i = 0; i < group.layers; ++i) shape_.planes.push_back({row_, row_});
    q_ = RandomBf16(group.num_heads * group.head_dim, 1);
    k_ = RandomBf16(row_, 2);
    v_ = RandomBf16(row_, 3);
    out_.resize(q_.size());
    shape_.groups.push_back(std::move(group));
  }

  void Measure(int64_t length) {
    const int64_t tokens = shape_.block_tokens;
    shape_.blocks = length / tokens + 1;
    auto cache = device_->kv_caches()->Make(shape_);
    Require(cache.status());
    const std::atomic<bool> never{false};
    Require((*cache)->Zero(never));
    table_.resize(shape_.blocks);
    for (size_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<uint32_t>(i);
    Fill(**cache, length);
    const int64_t layers = shape_.groups[0].layers;
    std::vector<double> rows, calls, steps;
    const int warm = 20;
    for (int step = -warm; step < absl::GetFlag(FLAGS_steps); ++step) {
      const auto begin = Clock::now();
      Require((*cache)->SetRows(0, {{length, 1, 1, length, table_}}));
      const double set = MicrosSince(begin);
      for (int plane = 0; plane < layers; ++plane) {
        DeviceKvCall call;
        call.plane = plane;
        call.q = q_;
        call.k = k_;
        call.v = v_;
        call.out = absl::MakeSpan(out_);
        const auto called = Clock::now();
        Require((*cache)->Run(call));
        if (step >= 0) calls.push_back(MicrosSince(called));
      }
      if (step < 0) continue;
      rows.push_back(set);
      steps.push_back(MicrosSince(begin));
    }
    const std::string name = absl::StrCat("decode of ", length, " keys");
    Report(name, "call", calls);
    Report(name, "rows", rows);
    Report(name, absl::StrCat("step of ", layers, " layers"), steps);
    std::nth_element(calls.begin(), calls.begin() + calls.size() / 2, calls.end());
    std::printf("%s,K/V rate of a call,%.1f,GB/s\n", name.c_str(),
                static_cast<double>(length + 1) * row_ * 4 / calls[calls.size() / 2] * 1e-3);
    std::fflush(stdout);
  }

  void MeasureBound() {
    const EmptyLaunch launch(static_cast<int64_t>(q_.size() + k_.size() + v_.size()) + 512);
    std::vector<double> us, without_copy;
    for (const bool copies : {true, false}) {
      for (int i = -100; i < 10 * absl::GetFlag(FLAGS_steps); ++i) {
        const auto begin = Clock::now();
        launch.Run(copies);
        if (i >= 0) (copies ? us : without_copy).push_back(MicrosSince(begin));
      }
    }
    Report("empty captured launch", absl::StrCat("with ", launch.bytes(), " bytes to the device"),
           us);
    Report("empty captured launch", "alone", without_copy);
    Report("empty captured launch", "with a doorbell", Doorbell(launch));
    for (const std::string& text : absl::GetFlag(FLAGS_waits_us)) {
      double wait = 0;
      if (!absl::SimpleAtod(text, &wait) || !(wait >= 1 && wait <= 1e6)) {
        std::fprintf(stderr, "--waits_us: %s is not between 1 and 1000000\n", text.c_str());
        std::exit(2);
      }
      std::vector<double> us = Doorbell(EmptyLaunch(launch.bytes(), wait));
      for (double& value : us) value -= wait;
      Report("empty captured launch", absl::StrCat("doorbell less a wait of ", text, " us"), us);
    }
  }

 private:
  // Microseconds of each round.
  std::vector<double> Doorbell(const EmptyLaunch& launch) {
    constexpr uint32_t kEnd = UINT32_MAX;
    alignas(64) uint8_t words[128] = {};  // a cache line for each word
    SharedWord request(words), response(words + 64);
    std::vector<char> tensors(launch.bytes()), shared(launch.bytes());
    std::vector<char> result(out_.size()), shared_result(out_.size());
    std::thread server([&] {
      for (uint32_t seen = 0; seen != kEnd;) {
        while (request.Load() == seen) {
        }
        seen = request.Load();
        if (seen != kEnd) {
          std::memcpy(launch.host(), shared.data(), shared.size());
          launch.Run(true);
          std::memcpy(shared_result.data(), launch.host(), shared_result.size());
        }
        response.Store(seen);
      }
    });
    std::vector<double> us;
    const int count = 10 * absl::GetFlag(FLAGS_steps);
    for (int i = 0; i < count + 100; ++i) {
      const uint32_t number = static_cast<uint32_t>(i) + 1;
      const auto begin = Clock::now();
      std::memcpy(shared.data(), tensors.data(), tensors.size());
      request.Store(number);
      while (response.Load() != number) {
      }
      std::memcpy(result.data(), shared_result.data(), result.size());
      if (i >= 100) us.push_back(MicrosSince(begin));
    }
    request.Store(kEnd);
    server.join();
    return us;
  }

  void Fill(DeviceKvCache& cache, int64_t length) {
    constexpr int64_t kChunk = 8192;
    const std::string k = RandomBf16(kChunk * row_, 4), v = RandomBf16(kChunk * row_, 5);
    for (int64_t first = 0; first < length; first += kChunk) {
      const int64_t count = std::min(kChunk, length - first);
      Require(cache.SetRows(0, {{first, count, 0, first + count, table_}}));
      for (int plane = 0; plane < shape_.groups[0].layers; ++plane) {
        DeviceKvCall call;
        call.plane = plane;
        call.k = absl::string_view(k).substr(0, count * row_ * 2);
        call.v = absl::string_view(v).substr(0, count * row_ * 2);
        Require(cache.Run(call));
      }
    }
  }

  Device* const device_;
  DeviceKvShape shape_;
  int64_t row_ = 0;
  std::string q_, k_, v_, out_;
  std::vector<uint32_t> table_;
};

int Main() {
  auto device = CudaDevice::Create(
      {.device = 0, .pinned_pool_bytes = 32 << 20, .make_kv_caches = MakeCudaKvCaches});
  Require(device.status());
  Bench bench(device->get());
  bench.MeasureBound();
  for (const std::string& text : absl::GetFlag(FLAGS_lengths)) {
    int64_t length = 0;
    if (!absl::SimpleAtoi(text, &length) || length < 1) {
      std::fprintf(stderr, "--lengths: %s is not a positive number\n", text.c_str());
      return 2;
    }
    bench.Measure(length);
  }
  bench.MeasureBound();
  return 0;
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::worker::Main();
}
