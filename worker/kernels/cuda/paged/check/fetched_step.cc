#include "worker/kernels/cuda/paged/check/fetched_step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ringattn::worker::cuda::paged::check {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 20;  // FetchedInput
constexpr int64_t kAlignment = 256;
constexpr std::chrono::seconds kPatience{20};

int64_t OutBytes(const PagedCase& c) {
  const int64_t element = c.options.partial ? 4 : ElementBytes(c.shape.dtype);
  return int64_t{c.batch.max_total_q} * c.options.num_heads * c.shape.head_dim_v * element;
}
int64_t LseBytes(const PagedCase& c) {
  return int64_t{c.options.num_heads} * c.batch.max_total_q * 4;
}

}  // namespace

void PinnedBuffer::Reset(int64_t bytes, int fill) {
  if (bytes > capacity_) {
    Check(cudaFreeHost(data_), "cudaFreeHost");
    data_ = nullptr;
    Check(cudaHostAlloc(&data_, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    capacity_ = bytes;
  }
  std::memset(data_, fill, bytes);
}

bool FetchedStep::Lay(const PagedCase& c) {
  bytes_ = kAlignment;  // the PagedStep
  const auto place = [this](size_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (static_cast<int64_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  rows_ = place(c.batch.max_rows * sizeof(PagedRow));
  tables_ = place(c.tables.size() * 4);
  q_ = place(c.q.size());
  k_ = place(c.new_k.size());
  v_ = place(c.new_v.size());
  sinks_ = place(c.sinks.size() * 4);
  return bytes_ <= kMostBytes;
}

Buffers FetchedStep::BuffersOf(const PagedCase& c, const Buffers& plain) const {
  char* const target = target_.get<char>();
  Buffers buffers = plain;
  buffers.step = reinterpret_cast<const PagedStep*>(target);
  buffers.rows = reinterpret_cast<const PagedRow*>(target + rows_);
  buffers.tables = reinterpret_cast<const int32_t*>(target + tables_);
  buffers.q = target + q_;
  buffers.k = target + k_;
  buffers.v = target + v_;
  if (!c.sinks.empty()) buffers.sinks = reinterpret_cast<const float*>(target + sinks_);
  buffers.out = out_.data();
  buffers.lse = reinterpret_cast<float*>(lse_.data());
  buffers.fetched = {input_.data(), target, bytes_};
  buffers.done = reinterpret_cast<uint32_t*>(done_.data());
  return buffers;
}

void FetchedStep::WriteStep(const PagedCase& c, uint32_t number, bool with_rows) {
  const auto write = [this](int64_t at, const auto& values) {
    if (!values.empty()) {
      std::memcpy(input_.data() + at, values.data(), values.size() * sizeof(values[0]));
    }
  };
  PagedStep step;
  step.num_rows = with_rows ? static_cast<int32_t>(c.paged_rows.size()) : 0;
  step.plane = c.plane;
  step.number = number;
  std::memcpy(input_.data(), &step, sizeof(step));
  if (!with_rows) return;
  write(rows_, c.paged_rows);
  write(tables_, c.tables);
  write(q_, c.q);
  write(k_, c.new_k);
  write(v_, c.new_v);
  write(sinks_, c.sinks);
}

std::string FetchedStep::Await(uint32_t number, bool signals, cudaStream_t stream) const {
  std::atomic_ref<uint32_t> word(*reinterpret_cast<uint32_t*>(done_.data()));
  if (!signals) {
    Check(cudaStreamSynchronize(stream), "fetched step");
    return word.load() == UINT32_MAX ? "" : "a launch that never signals has stored the word";
  }
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (word.load(std::memory_order_acquire) != number) {
    if (std::chrono::steady_clock::now() < end) continue;
    Check(cudaStreamSynchronize(stream), "fetched step");
    return absl::StrCat("the launch ended without its signal; the word is ", word.load());
  }
  return "";
}

std::string FetchedStep::Run(const PagedCase& c, const Buffers& plain, const DeviceInfo& device,
                             KernelChoice choice, cudaStream_t stream, const std::vector<char>& out,
                             const std::vector<float>& lse, const std::function<void()>& before,
                             const std::function<bool()>& after, bool* signals) {
  input_.Reset(bytes_, 0x7F);
  target_.Reset(bytes_, 0x7F);
  out_.Reset(OutBytes(c), 0xFF);
  lse_.Reset(LseBytes(c), 0xFF);
  done_.Reset(kAlignment, 0xFF);
  auto attention =
      PagedAttention::Create(c.shape, c.options, c.batch, BuffersOf(c, plain), device, choice);
  if (!attention.ok()) return std::string(attention.status().message());
  *signals = (*attention)->signals_done();
  WriteStep(c, 1, /*with_rows=*/false);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const absl::Status captured = (*attention)->Enqueue(stream);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(captured);
  Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  const auto equal = [&](const char* what) -> std::string {
    if (std::memcmp(out_.data(), out.data(), out.size()) == 0 &&
        std::memcmp(lse_.data(), lse.data(), lse.size() * sizeof(float)) == 0) {
      return "";
    }
    return absl::StrCat(what, " gave other bits");
  };
  const auto launch = [&](uint32_t number) {
    Check(cudaGraphLaunch(executable, stream), "replay");
    return Await(number, *signals, stream);
  };
  std::string error = launch(1);  // without rows
  for (uint32_t number = 2; number < 4 && error.empty(); ++number) {
    before();
    WriteStep(c, number, /*with_rows=*/true);
    out_.Reset(OutBytes(c), 0xFF);
    lse_.Reset(LseBytes(c), 0xFF);
    error = launch(number);
    if (error.empty()) error = equal("a fetched step");
    Check(cudaStreamSynchronize(stream), "fetched step");
    if (error.empty() && !after()) error = "the cache differs after the append of a fetched step";
  }
  if (error.empty()) {
    WriteStep(c, 4, /*with_rows=*/true);
    out_.Reset(OutBytes(c), 0xFF);
    lse_.Reset(LseBytes(c), 0xFF);
    Check((*attention)->EnqueueRead(stream));
    error = Await(4, *signals, stream);
    if (error.empty()) error = equal("reading alone with a fetched step");
  }
  Check(cudaStreamSynchronize(stream), "fetched step");
  if (error.empty() && !target_.GuardsIntact()) error = "memory around a fetched step was written";
  Check(cudaGraphExecDestroy(executable), "graph");
  Check(cudaGraphDestroy(graph), "graph");
  return error;
}

}  // namespace ringattn::worker::cuda::paged::check
