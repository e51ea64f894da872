#include "worker/device/cuda/cuda_kv_scratch.h"

#include <atomic>
#include <utility>

#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"
#include "worker/device/cuda/tables/kv_batch_class.h"

namespace ringattn::worker {
namespace {

// A wait polls for this long, and then sleeps in the driver.
constexpr absl::Duration kPollTime = absl::Milliseconds(20);
// A launch that has failed stores no word, so the stream is asked now and then.
constexpr absl::Duration kQueryInterval = absl::Milliseconds(1);
constexpr int64_t kDoneBytes = 128;

}  // namespace

CudaKvScratch::~CudaKvScratch() {
  if (!events_->UseDevice().ok()) return;
  if (stream_ != nullptr) {
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
  }
  for (char* pinned : {pinned_input, pinned_output, pinned_tables}) {
    if (pinned != nullptr) (void)cudaFreeHost(pinned);
  }
  if (done_word_ != nullptr) (void)cudaFreeHost(done_word_);
}

absl::Status CudaKvScratch::Init(Device* device) {
  if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
  int lowest = 0, highest = 0;
  absl::Status status = CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                                   "cudaDeviceGetStreamPriorityRange");
  // A step is short, and an engine waits for it; operations take seconds.
  if (status.ok()) {
    status = CudaStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
                        "cudaStreamCreateWithPriority");
  }
  for (const auto& [target, bytes] :
       {std::pair(&pinned_input, kSmallCallBytes), std::pair(&pinned_output, kSmallCallBytes),
        std::pair(&pinned_tables, kPinnedTableBytes)}) {
    if (!status.ok()) return status;
    status =
        CudaStatus(cudaHostAlloc(reinterpret_cast<void**>(target), bytes, cudaHostAllocDefault),
                   "cudaHostAlloc");
  }
  if (status.ok()) {
    status = CudaStatus(
        cudaHostAlloc(reinterpret_cast<void**>(&done_word_), kDoneBytes, cudaHostAllocDefault),
        "cudaHostAlloc");
  }
  if (!status.ok()) return status;
  *done_word_ = number_;
  for (const auto& [target, bytes] :
       {std::pair(&input_, kInputBytes), std::pair(&output_, kOutputBytes),
        std::pair(&workspace_, kWorkspaceBytes)}) {
    auto memory = device->Allocate(bytes);
    if (!memory.ok()) return memory.status();
    *target = *std::move(memory);
  }
  return absl::OkStatus();
}

absl::Status CudaKvScratch::Wait() {
  const absl::Time give_up = MonotonicNow() + kPollTime;
  cudaError_t state = cudaErrorNotReady;
  for (int i = 0; state == cudaErrorNotReady; ++i) {
    state = cudaStreamQuery(stream_);
    if (i % 64 == 63 && MonotonicNow() >= give_up) break;
  }
  if (state == cudaErrorNotReady) state = cudaStreamSynchronize(stream_);
  (void)cudaGetLastError();  // cudaErrorNotReady of a poll
  pinned_table_bytes = 0;
  return Check(CudaStatus(state, "a step of a K/V cache"));
}

absl::Status CudaKvScratch::WaitForSignal() {
  const std::atomic_ref<uint32_t> word(*done_word_);
  const absl::Time give_up = MonotonicNow() + kPollTime;
  absl::Time next_query = MonotonicNow() + kQueryInterval;
  for (int i = 0; word.load(std::memory_order_acquire) != number_; ++i) {
    if (i % 256 != 255) continue;
    const absl::Time now = MonotonicNow();
    if (now < next_query) continue;
    next_query = now + kQueryInterval;
    if (now >= give_up || cudaStreamQuery(stream_) != cudaErrorNotReady) return Wait();
  }
  pinned_table_bytes = 0;
  return absl::OkStatus();
}

absl::Status CudaKvScratch::Check(absl::Status status) {
  if (status.ok()) return status;
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state != cudaSuccess && state != cudaErrorNotReady) {
    (void)cudaGetLastError();
    events_->ReportBroken(status);
  }
  return status;
}

}  // namespace ringattn::worker
