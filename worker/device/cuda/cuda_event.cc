#include "worker/device/cuda/cuda_event.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"
#include "worker/device/cuda/exact_timers.h"

namespace ringattn::worker {
namespace {

// A run enqueues a few steps with a handful of calls and transfers, two events each. Staged copies
// need more.
constexpr int kEventsAtStart = 512;
constexpr absl::Duration kReferenceAge = absl::Seconds(5);
constexpr absl::Duration kRebaseBound = absl::Milliseconds(1);
constexpr absl::Duration kGoodWindow = absl::Microseconds(100);
constexpr int kAttempts = 10;
// An awaited event is polled without a pause at first, because short work ends within microseconds.
// Later pauses are a fraction of the time so far.
constexpr absl::Duration kSpin = absl::Microseconds(20);
constexpr int kPauseDivisor = 16;
constexpr absl::Duration kShortestPause = absl::Microseconds(10);
constexpr absl::Duration kLongestPause = absl::Microseconds(200);

}  // namespace

absl::StatusOr<CudaEventPool*> CudaEventPool::ForDevice(int device) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto* pools = new std::map<int, std::unique_ptr<CudaEventPool>>();
  absl::MutexLock lock(&mutex);
  std::unique_ptr<CudaEventPool>& pool = (*pools)[device];
  if (pool == nullptr) {
    std::unique_ptr<CudaEventPool> made(new CudaEventPool(device));
    if (absl::Status status = made->Init(); !status.ok()) return status;
    pool = std::move(made);
  }
  return pool.get();
}

absl::Status CudaEventPool::Init() {
  absl::Status status = UseDevice();
  if (!status.ok()) return status;
  int lowest = 0, highest = 0;
  status = CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                      "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  status = CudaStatus(cudaStreamCreateWithPriority(&clock_stream_, cudaStreamNonBlocking, highest),
                      "cudaStreamCreateWithPriority");
  std::vector<cudaEvent_t> events;
  for (int i = 0; i < kEventsAtStart && status.ok(); ++i) {
    cudaEvent_t event = nullptr;
    status = CudaStatus(cudaEventCreate(&event), "cudaEventCreate");
    events.push_back(event);
  }
  if (!status.ok()) return status;
  {
    absl::MutexLock lock(&mutex_);
    free_ = std::move(events);
  }
  Rebase();
  if (reference() == nullptr) {
    return absl::InternalError(
        absl::StrCat("CUDA device ", device_, " did not record an event within a second"));
  }
  return absl::OkStatus();
}

absl::Status CudaEventPool::UseDevice() const {
  return CudaStatus(cudaSetDevice(device_), "cudaSetDevice");
}

absl::StatusOr<cudaEvent_t> CudaEventPool::Take() {
  {
    absl::MutexLock lock(&mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  absl::Status status = CudaStatus(cudaEventCreate(&event), "cudaEventCreate");
  if (!status.ok()) return status;
  return event;
}

void CudaEventPool::Give(cudaEvent_t event) {
  if (event == nullptr) return;
  absl::MutexLock lock(&mutex_);
  free_.push_back(event);
}

std::shared_ptr<const CudaEventPool::Reference> CudaEventPool::reference() const {
  absl::MutexLock lock(&mutex_);
  return reference_;
}

void CudaEventPool::Rebase() {
  const std::shared_ptr<const Reference> old = reference();
  if (old != nullptr && MonotonicNow() - old->time < kReferenceAge) return;
  if (!UseDevice().ok()) return;
  // Events that were created with the old reference may still use it.
  const auto give_back = [this](const Reference* reference) {
    Give(reference->event);
    delete reference;
  };
  // The first reference must succeed, and the device may have to wake up for it.
  const absl::Time deadline = MonotonicNow() + (old == nullptr ? absl::Seconds(1) : kRebaseBound);
  std::shared_ptr<const Reference> best;
  absl::Duration best_window = absl::InfiniteDuration();
  // The measurement with the shortest window counts. A thread that loses its processor gets a
  // longer window, and the mapping is off by as much.
  for (int attempt = 1; attempt <= kAttempts && best_window >= kGoodWindow; ++attempt) {
    absl::StatusOr<cudaEvent_t> event = Take();
    if (!event.ok()) break;
    std::shared_ptr<Reference> fresh(new Reference{*event, {}}, give_back);
    const absl::Time begin = MonotonicNow();
    if (cudaEventRecord(*event, clock_stream_) != cudaSuccess) break;
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady && MonotonicNow() < deadline) state = cudaEventQuery(*event);
    if (state != cudaSuccess) break;
    const absl::Duration window = MonotonicNow() - begin;
    if (window >= best_window) continue;
    fresh->time = begin + window / 2;
    best = std::move(fresh);
    best_window = window;
  }
  if (best == nullptr) return;
  absl::MutexLock lock(&mutex_);
  reference_.swap(best);  // the old one is destroyed after the lock is released, because its
                          // deleter takes the lock
}

void CudaEventPool::SetOnBroken(std::function<void(const std::string&)> on_broken) {
  absl::MutexLock lock(&mutex_);
  on_broken_ = std::move(on_broken);
}

void CudaEventPool::ReportBroken(const absl::Status& status) {
  std::function<void(const std::string&)> on_broken;
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(broken_, true)) return;
    on_broken = on_broken_;
  }
  if (on_broken) on_broken(std::string(status.message()));
}

CudaEvent::CudaEvent(CudaEventPool* pool, RunControl* control, int64_t progress)
    : pool_(pool), progress_(progress), reference_(pool->reference()), control_(control) {}

CudaEvent::~CudaEvent() {
  pool_->Give(begin_);
  pool_->Give(end_);
}

absl::Status CudaEvent::RecordBegin(cudaStream_t stream) {
  absl::StatusOr<cudaEvent_t> event = pool_->Take();
  if (!event.ok()) return event.status();
  absl::MutexLock lock(&mutex_);
  begin_ = *event;
  return CudaStatus(cudaEventRecord(begin_, stream), "cudaEventRecord");
}

absl::Status CudaEvent::RecordEnd(cudaStream_t stream) {
  absl::StatusOr<cudaEvent_t> event = pool_->Take();
  if (!event.ok()) return event.status();
  absl::Status status = CudaStatus(cudaEventRecord(*event, stream), "cudaEventRecord");
  if (!status.ok()) {
    pool_->Give(*event);
    return status;
  }
  absl::MutexLock lock(&mutex_);
  end_ = *event;
  return status;
}

void CudaEvent::Fail(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  if (done_) return;
  if (status_.ok()) status_ = std::move(status);
  if (end_ == nullptr) Finish();
}

void CudaEvent::FailAndHold(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  if (done_) return;
  if (status_.ok()) status_ = std::move(status);
  held_ = end_ != nullptr;
  if (!held_) Finish();
}

void CudaEvent::ReleaseHold() {
  absl::MutexLock lock(&mutex_);
  held_ = false;
}

bool CudaEvent::Poll() const {
  if (done_ || end_ == nullptr || held_) return done_;
  absl::Status status = pool_->UseDevice();
  if (status.ok()) {
    const cudaError_t state = cudaEventQuery(end_);
    if (state == cudaErrorNotReady) return false;
    status = CudaStatus(state, "work on the CUDA stream");
  }
  if (!status.ok()) {
    if (status_.ok()) status_ = status;
    pool_->ReportBroken(status);
  }
  Finish();
  return true;
}

void CudaEvent::Finish() const {
  begin_time_ = end_time_ = MonotonicNow();
  if (end_ != nullptr) {
    end_time_ = TimeOf(end_);
    begin_time_ = end_time_ - ElapsedSinceBegin();
  }
  if (control_ != nullptr && status_.ok()) control_->progress.fetch_add(progress_);
  control_ = nullptr;
  done_ = true;
}

absl::Time CudaEvent::TimeOf(cudaEvent_t event) const {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, reference_->event, event) != cudaSuccess) {
    (void)cudaGetLastError();  // a failed stream has no times
    return MonotonicNow();
  }
  return reference_->time + absl::Milliseconds(milliseconds);
}

// Exact however old the reference is; times relative to an old reference are coarse in fp32
// milliseconds.
absl::Duration CudaEvent::ElapsedSinceBegin() const {
  float milliseconds = 0;
  if (begin_ == nullptr) return absl::ZeroDuration();
  if (cudaEventElapsedTime(&milliseconds, begin_, end_) != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(std::max(milliseconds, 0.0f));
}

bool CudaEvent::Done() const {
  absl::MutexLock lock(&mutex_);
  return Poll();
}

absl::Status CudaEvent::Wait(absl::Time deadline) const {
  const absl::Time begin = MonotonicNow();
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (Poll()) return status_;
    }
    const absl::Time now = MonotonicNow();
    if (now >= deadline) return absl::DeadlineExceededError("the work has not ended in time");
    if (now - begin < kSpin) continue;
    UseExactTimers();
    const absl::Duration pause =
        std::clamp((now - begin) / kPauseDivisor, kShortestPause, kLongestPause);
    absl::SleepFor(std::min(pause, deadline - now));
  }
}

absl::Time CudaEvent::begin_time() const {
  absl::MutexLock lock(&mutex_);
  return begin_time_;
}

absl::Time CudaEvent::end_time() const {
  absl::MutexLock lock(&mutex_);
  return end_time_;
}

absl::Status CudaEvent::failure() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

bool CudaEvent::stop_requested() const {
  absl::MutexLock lock(&mutex_);
  return control_ != nullptr && control_->stop.load(std::memory_order_relaxed);
}

absl::Status CudaEvent::MakeStreamWait(cudaStream_t stream) const {
  cudaEvent_t end = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (!done_) end = end_;
  }
  // Without the lock, which Done() takes: this call blocks if the stream is full.
  if (end == nullptr) return absl::OkStatus();
  return CudaStatus(cudaStreamWaitEvent(stream, end, 0), "cudaStreamWaitEvent");
}

absl::Status CudaEvent::MakeStreamWaitForBegin(cudaStream_t stream) const {
  cudaEvent_t begin = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (!done_) begin = begin_;
  }
  if (begin == nullptr) return absl::OkStatus();
  return CudaStatus(cudaStreamWaitEvent(stream, begin, 0), "cudaStreamWaitEvent");
}

absl::Status WaitOnStream(cudaStream_t stream, const std::vector<EventRef>& after) {
  for (const EventRef& event : after) {
    const auto* cuda_event = dynamic_cast<const CudaEvent*>(event.get());
    if (cuda_event == nullptr) {
      return absl::InternalError("a CUDA stream cannot wait for an event of another kind");
    }
    if (absl::Status status = cuda_event->MakeStreamWait(stream); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status KnownFailure(const std::vector<EventRef>& after) {
  for (const EventRef& event : after) {
    const auto* cuda_event = dynamic_cast<const CudaEvent*>(event.get());
    if (cuda_event == nullptr) continue;
    if (absl::Status status = cuda_event->failure(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace ringattn::worker
