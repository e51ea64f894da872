#include "worker/device/cuda/cuda_device.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "worker/device/cuda/cuda_status.h"
#include "worker/device/cuda/exact_timers.h"

namespace ringattn::worker {
namespace {

// Polling intervals of the service thread. While there are only calls or idle downloads: this
// bounds the time until a stop reaches the kernels. A reader that begins to wait ends the pause.
constexpr absl::Duration kPause = absl::Milliseconds(1);
// While downloads wait for copies: short at first, because a small copy takes 10 us.
constexpr absl::Duration kShortestBusyPause = absl::Microseconds(10);
constexpr absl::Duration kLongestBusyPause = absl::Microseconds(200);
constexpr int kOldestComputeMajor = 8;

absl::Status NoSuchDevice(int device, int count) {
  return absl::InvalidArgumentError(absl::StrCat(
      "no CUDA device ", device, ": this process can use ", count, ", numbered from 0"));
}

}  // namespace

absl::StatusOr<int> CudaDeviceCount() {
  // The driver reads both variables when the next call initializes it. LoadKernels loads kernels
  // explicitly, on this process's device only. Eager loading would load them on every device whose
  // memory is mapped, at 2.7 s each.
  setenv("CUDA_MODULE_LOADING", "LAZY", /*overwrite=*/1);
  // By default, streams share eight queues, and streams that share one wait for each other. Some
  // streams here wait for peers. With the single queue that training frameworks set, a ring would
  // deadlock.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/1);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  (void)cudaGetLastError();
  return absl::UnavailableError(absl::StrCat("no CUDA device: ", error == cudaSuccess
                                                                     ? "the driver has none"
                                                                     : cudaGetErrorString(error)));
}

absl::StatusOr<int64_t> CudaFreeBytes(int device) {
  absl::StatusOr<int> count = CudaDeviceCount();
  if (!count.ok()) return count.status();
  if (device < 0 || device >= *count) return NoSuchDevice(device, *count);
  absl::Status status = CudaStatus(cudaSetDevice(device), "cudaSetDevice");
  size_t free = 0, total = 0;
  if (status.ok()) status = CudaStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (!status.ok()) return status;
  return static_cast<int64_t>(free);
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(CudaDeviceOptions options) {
  absl::StatusOr<int> count = CudaDeviceCount();
  if (!count.ok()) return count.status();
  if (options.device < 0 || options.device >= *count) {
    return NoSuchDevice(options.device, *count);
  }
  absl::Status known = cuda::CheckFamily(options.kernel_family);
  if (!known.ok()) return known;
  absl::StatusOr<CudaEventPool*> events = CudaEventPool::ForDevice(options.device);
  if (!events.ok()) return events.status();
  std::unique_ptr<CudaDevice> device(new CudaDevice(*events, std::move(options)));
  if (absl::Status status = device->Init(); !status.ok()) return status;
  return device;
}

CudaDevice::CudaDevice(CudaEventPool* events, CudaDeviceOptions options)
    : events_(events), options_(std::move(options)) {
  kernels_.tuning.family = options_.kernel_family;
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  blocking_launches_ = blocking != nullptr && std::atoi(blocking) != 0;
  events_->SetOnBroken(options_.on_broken);
}

absl::Status CudaDevice::Init() {
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  absl::StatusOr<cuda::DeviceInfo> info = cuda::QueryDevice(options_.device);
  if (!info.ok()) return info.status();
  kernels_.device = *info;
  cudaDeviceProp properties;
  status =
      CudaStatus(cudaGetDeviceProperties(&properties, options_.device), "cudaGetDeviceProperties");
  if (!status.ok()) return status;
  description_ = absl::StrCat("cuda:", options_.device, " (", properties.name,
                              ", compute capability ", properties.major, ".", properties.minor,
                              ", ", kernels_.device.sm_count, " SMs)");
  if (kernels_.device.compute_major < kOldestComputeMajor) {
    return absl::UnimplementedError(
        absl::StrCat(description_, ": kernels need compute capability 8.0 or later"));
  }
  status = cuda::LoadKernels(kernels_.device);
  if (!status.ok()) return status;
  int lowest = 0, highest = 0;
  status = CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                      "cudaDeviceGetStreamPriorityRange");
  // Transfers have priority: their kernels are small, and peers wait for them.
  if (status.ok()) {
    status = CudaStatus(cudaStreamCreateWithPriority(&compute_, cudaStreamNonBlocking, lowest),
                        "cudaStreamCreateWithPriority");
  }
  if (status.ok()) {
    status = CudaStatus(cudaStreamCreateWithPriority(&overlapping_, cudaStreamNonBlocking, lowest),
                        "cudaStreamCreateWithPriority");
  }
  if (status.ok()) {
    // A lower number is a higher priority.
    const int preempting = std::max(highest, lowest - 1);
    status =
        CudaStatus(cudaStreamCreateWithPriority(&preempting_, cudaStreamNonBlocking, preempting),
                   "cudaStreamCreateWithPriority");
  }
  if (status.ok()) {
    status = CudaStatus(cudaStreamCreateWithPriority(&stop_stream_, cudaStreamNonBlocking, highest),
                        "cudaStreamCreateWithPriority");
  }
  if (status.ok()) {
    status = CudaStatus(cudaStreamCreateWithPriority(&keys_stream_, cudaStreamNonBlocking, highest),
                        "cudaStreamCreateWithPriority");
  }
  if (status.ok()) {
    status = CudaStatus(cudaHostAlloc(reinterpret_cast<void**>(&numbers_),
                                      kMostArrivals * sizeof(*numbers_), cudaHostAllocDefault),
                        "cudaHostAlloc");
  }
  if (!status.ok()) return status;
  std::iota(numbers_, numbers_ + kMostArrivals, 1);
  absl::StatusOr<std::unique_ptr<CudaMemory>> memory = CudaMemory::Create(
      events_, options_.in_regions, options_.memory_limit_bytes, options_.region_sharing);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  absl::StatusOr<std::unique_ptr<CudaStaging>> staging =
      CudaStaging::Create(events_, options_.pinned_pool_bytes);
  if (!staging.ok()) return staging.status();
  staging_ = *std::move(staging);
  staging_->SetOnReaderWaits([this] { OnReaderWaits(); });
  if (options_.make_kv_caches != nullptr) {
    kv_caches_ = options_.make_kv_caches(events_, this, kernels_.device);
  }
  thread_ = std::thread([this] { ServiceLoop(); });
  pthread_setname_np(thread_.native_handle(), "cuda_device");
  return absl::OkStatus();
}

CudaDevice::~CudaDevice() {
  if (thread_.joinable()) {
    {
      absl::MutexLock lock(&mutex_);
      closing_ = true;
      wake_.Signal();
    }
    end_pause_.Notify();
    thread_.join();
  }
  events_->SetOnBroken(nullptr);
  if (!events_->UseDevice().ok()) return;
  for (cudaStream_t stream : {compute_, overlapping_, preempting_, stop_stream_, keys_stream_}) {
    if (stream == nullptr) continue;
    (void)cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
  }
  if (numbers_ != nullptr) (void)cudaFreeHost(numbers_);
}

absl::StatusOr<std::unique_ptr<DeviceBuffer>> CudaDevice::Allocate(int64_t bytes) {
  return memory_->Allocate(bytes);
}

absl::StatusOr<int64_t> CudaDevice::WorkspaceBytes(const std::vector<KernelCall>& calls) const {
  if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
  return CudaWorkspaceBytes(calls, kernels_);
}

bool CudaDevice::TakesLateKeys(const ForwardCall& call) const {
  return !blocking_launches_ && CudaTakesLateKeys(call, kernels_);
}

absl::StatusOr<PreparedCalls> CudaDevice::Prepare(std::vector<KernelCall> calls) {
  if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
  events_->Rebase();
  return PrepareCudaCalls(calls, kernels_, events_, memory_.get(), this);
}

EventRef CudaDevice::StartCall(const PreparedCudaCall& call, StartAfter after,
                               RunControl* control) {
  auto event = std::make_shared<CudaEvent>(events_, control, 1);
  absl::Status status = KnownFailure(after.all);
  if (!status.ok()) {
    event->Fail(std::move(status));
    return event;
  }
  status = Enqueue(call, after, *control, event);
  if (!status.ok()) {
    event->Fail(status);
    CheckContext(status);
  }
  absl::MutexLock lock(&mutex_);
  in_flight_.push_back({event, std::move(after.all), call.workspace(), control->preempts});
  awake_ = true;
  wake_.Signal();
  return event;
}

absl::StatusOr<cudaStream_t> CudaDevice::NextStream(const StartAfter& after) {
  if (last_call_ == nullptr) return compute_;
  if (!after.overlaps_previous) {
    if (last_stream_ == compute_) return compute_;
    if (absl::Status s = last_call_->MakeStreamWait(compute_); !s.ok()) return s;
    return compute_;
  }
  // The previous call began after all calls before it had ended, except one on the returned stream.
  const cudaStream_t stream = last_stream_ == compute_ ? overlapping_ : compute_;
  if (absl::Status s = last_call_->MakeStreamWaitForBegin(stream); !s.ok()) return s;
  return stream;
}

absl::Status CudaDevice::Enqueue(const PreparedCudaCall& call, StartAfter& after,
                                 const RunControl& control,
                                 const std::shared_ptr<CudaEvent>& event) {
  const bool awaits_keys = !control.preempts && after.bring_keys && call.keys_word() != nullptr &&
                           !control.stop.load(std::memory_order_relaxed);
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  cudaStream_t stream = preempting_;
  if (!control.preempts) {
    const absl::StatusOr<cudaStream_t> next = NextStream(after);
    if (!next.ok()) return next.status();
    stream = *next;
  }
  if (!awaits_keys) after.all = std::move(after).Joined();
  status = WaitOnStream(stream, after.all);
  if (!status.ok()) return status;
  status = event->RecordBegin(stream);
  if (!status.ok()) return status;
  if (awaits_keys || !control.stop.load(std::memory_order_relaxed)) {
    status = call.Launch(stream, awaits_keys);
  }
  if (awaits_keys) status.Update(BringKeys(call, stream, *event, after));
  if (!control.preempts) {
    // Who waits for this call also waits for the one that it overlapped.
    if (after.overlaps_previous && last_call_ != nullptr) {
      status.Update(last_call_->MakeStreamWait(stream));
    }
    last_call_ = event;
    last_stream_ = stream;
  }
  // Even if a launch failed, because an earlier launch of the call may use the operands.
  absl::Status recorded = event->RecordEnd(stream);
  status.Update(recorded);
  return status;
}

absl::Status CudaDevice::BringKeys(const PreparedCudaCall& call, cudaStream_t stream,
                                   const CudaEvent& begun, StartAfter& after) {
  const std::vector<std::vector<EventRef>> arrivals = std::exchange(after.bring_keys, {})();
  for (const std::vector<EventRef>& keys : arrivals) {
    after.all.insert(after.all.end(), keys.begin(), keys.end());
  }
  // Also waits for the call's begin, because the previous launch resets the word to 0. A copy
  // engine writes the word, so it arrives even if the kernel occupies every SM.
  CudaEvent signalled(events_, nullptr, 0);
  absl::Status status = begun.MakeStreamWaitForBegin(keys_stream_);
  for (size_t i = 0; i < arrivals.size() && status.ok(); ++i) {
    status = WaitOnStream(keys_stream_, arrivals[i]);
    if (!status.ok()) break;
    status = CudaStatus(cudaMemcpyAsync(call.keys_word(), &numbers_[i], sizeof(*numbers_),
                                        cudaMemcpyHostToDevice, keys_stream_),
                        "cudaMemcpyAsync of the late-key signal");
  }
  if (status.ok()) status = signalled.RecordEnd(keys_stream_);
  // Prevents the kernel from waiting for keys that will not arrive.
  if (!status.ok()) (void)call.workspace()->Stop(stop_stream_, numbers_);
  // The word may be written after a stopped kernel has ended, so the call owns it until then.
  status.Update(signalled.MakeStreamWait(stream));
  for (const std::vector<EventRef>& keys : arrivals) status.Update(KnownFailure(keys));
  return status;
}

void CudaDevice::CheckContext(const absl::Status& failure) {
  // An invalid argument leaves the stream usable. An error that persists has broken the context.
  const cudaError_t state = cudaStreamQuery(stop_stream_);
  if (state == cudaSuccess || state == cudaErrorNotReady) return;
  (void)cudaGetLastError();
  events_->ReportBroken(failure);
}

bool CudaDevice::waits_for_transfer() const {
  std::vector<EventRef> after;
  {
    absl::MutexLock lock(&mutex_);
    for (const InFlight& call : in_flight_) {
      if (call.preempts || call.event->Done()) continue;
      after = call.after;
      break;
    }
  }
  for (const EventRef& event : after) {
    if (!event->Done()) return true;
  }
  return false;
}

void CudaDevice::ServiceLoop() {
  if (!events_->UseDevice().ok()) return;
  UseExactTimers();
  absl::Duration busy_pause = kShortestBusyPause;
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return closing_ || awake_; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      while (!has_news()) wake_.Wait(&mutex_);
      if (closing_) return;
      awake_ = false;
    }
    const bool calls = ServiceCalls();
    const CudaStaging::Downloads downloads = staging_->AdvanceDownloads();
    if (!calls && downloads == CudaStaging::Downloads::kNone) continue;
    absl::Duration pause = kPause;
    if (downloads == CudaStaging::Downloads::kBusy) {
      pause = busy_pause;
      busy_pause = std::min(2 * busy_pause, kLongestBusyPause);
    }
    if (end_pause_.WaitFor(pause)) busy_pause = kShortestBusyPause;
    absl::MutexLock lock(&mutex_);
    awake_ = true;
  }
}

void CudaDevice::OnReaderWaits() {
  {
    absl::MutexLock lock(&mutex_);
    awake_ = true;
    wake_.Signal();
  }
  end_pause_.Notify();
}

bool CudaDevice::ServiceCalls() {
  std::deque<InFlight> calls;
  {
    absl::MutexLock lock(&mutex_);
    while (!in_flight_.empty() && in_flight_.front().event->Done()) in_flight_.pop_front();
    calls = in_flight_;
  }
  for (const InFlight& call : calls) {
    if (!call.event->stop_requested()) continue;
    absl::Status status = call.workspace->Stop(stop_stream_, numbers_);
    if (!status.ok()) CheckContext(status);
  }
  return !calls.empty();
}

absl::Status CudaDevice::CopyFromHost(void* device, const void* host, int64_t bytes) {
  return memory_->CopyFromHost(device, host, bytes);
}

absl::Status CudaDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  return memory_->CopyToHost(host, device, bytes);
}

absl::StatusOr<EventRef> CudaDevice::StartCopyFromHost(void* device, const void* host,
                                                       int64_t bytes) {
  return memory_->StartCopyFromHost(device, host, bytes);
}

absl::Status CudaDevice::CopyAllToHost(absl::Span<const DeviceCopy> copies) {
  return memory_->CopyAllToHost(copies);
}

absl::StatusOr<std::unique_ptr<Upload>> CudaDevice::BeginUpload(std::vector<UploadTarget> targets) {
  return staging_->BeginUpload(std::move(targets));
}

absl::StatusOr<std::unique_ptr<HostPin>> CudaDevice::PinHost(void* data, int64_t bytes) {
  return staging_->PinHost(data, bytes);
}

absl::StatusOr<EventRef> CudaDevice::CopyToPinned(void* pinned, const void* device, int64_t bytes) {
  return staging_->CopyToHost(pinned, device, bytes);
}

std::unique_ptr<Download> CudaDevice::BeginDownload(std::vector<DeviceRange> ranges,
                                                    std::function<void()> on_ready) {
  std::unique_ptr<Download> download =
      staging_->BeginDownload(std::move(ranges), std::move(on_ready));
  absl::MutexLock lock(&mutex_);
  awake_ = true;
  wake_.Signal();
  return download;
}

absl::StatusOr<CudaImports*> CudaDevice::Imports() {
  absl::MutexLock lock(&imports_mutex_);
  if (imports_ == nullptr) {
    absl::StatusOr<std::unique_ptr<CudaImports>> imports = CudaImports::Create(events_);
    if (!imports.ok()) return imports.status();
    imports_ = *std::move(imports);
  }
  return imports_.get();
}

absl::StatusOr<std::unique_ptr<ImportedMemory>> CudaDevice::ImportMemory(
    const SharedAllocation& allocation) {
  const absl::StatusOr<CudaImports*> imports = Imports();
  if (!imports.ok()) return imports.status();
  return (*imports)->Import(allocation);
}

absl::StatusOr<EventRef> CudaDevice::CopyImported(absl::Span<const DeviceCopy> pieces,
                                                  ImportedCopy direction) {
  const absl::StatusOr<CudaImports*> imports = Imports();
  if (!imports.ok()) return imports.status();
  return (*imports)->Copy(pieces, direction);
}

DeviceUsage CudaDevice::usage() const {
  return {memory_->device_used_bytes(), memory_->allocated_bytes(), staging_->used_bytes()};
}

}  // namespace ringattn::worker
