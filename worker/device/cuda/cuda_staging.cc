#include "worker/device/cuda/cuda_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_download.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

// Blocks are returned at the rate of the link, regardless of compute. A wait this long means that
// the device has a problem.
constexpr absl::Duration kUploadWait = absl::Seconds(30);

class CudaUpload : public Upload {
 public:
  CudaUpload(CudaStaging* staging, std::vector<UploadTarget> targets) : staging_(staging) {
    for (const UploadTarget& target : targets) left_bytes_ += target.bytes;
    cursor_ = TargetCursor(std::move(targets));
  }

  // Copies in flight write to memory that may be freed after this.
  ~CudaUpload() override {
    if (finished_) return;
    for (const EventRef& event : events_) (void)event->Wait(absl::InfiniteFuture());
  }

  absl::Status Append(const void* data, int64_t bytes) override {
    const char* source = static_cast<const char*>(data);
    while (bytes > 0) {
      if (!block_) {
        absl::StatusOr<PinnedPool::Block> block =
            staging_->pool()->TakeForUpload(MonotonicNow() + kUploadWait);
        if (!block.ok()) return block.status();
        block_ = *std::move(block);
      }
      const int64_t part = std::min(bytes, block_.bytes() - filled_bytes_);
      std::memcpy(block_.data() + filled_bytes_, source, part);
      filled_bytes_ += part;
      source += part;
      bytes -= part;
      left_bytes_ -= part;
      if (filled_bytes_ < block_.bytes() && left_bytes_ > 0) continue;
      if (absl::Status status = Flush(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status AppendPinned(const void* data, int64_t bytes) override {
    if (absl::Status status = Flush(); !status.ok()) return status;
    absl::StatusOr<EventRef> copied = CopyOn(data, bytes);
    if (!copied.ok()) return copied.status();
    events_.push_back(*std::move(copied));
    left_bytes_ -= bytes;
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<EventRef>> Finish() override {
    if (absl::Status status = Flush(); !status.ok()) return status;
    finished_ = true;
    return std::move(events_);
  }

 private:
  // Copies the next bytes to the position where the previous ones ended.
  absl::StatusOr<EventRef> CopyOn(const void* pinned, int64_t bytes) {
    const auto* source = static_cast<const char*>(pinned);
    std::vector<DeviceCopy> copies;
    cursor_.Advance(bytes, [&](void* to, int64_t part) {
      copies.push_back({to, source, part});
      source += part;
    });
    return staging_->CopyToDevice(copies);
  }

  absl::Status Flush() {
    if (filled_bytes_ == 0) return absl::OkStatus();
    absl::StatusOr<EventRef> copied = CopyOn(block_.data(), filled_bytes_);
    if (!copied.ok()) return copied.status();
    staging_->pool()->ReturnAfter(std::move(block_), *copied);
    block_ = PinnedPool::Block();
    events_.push_back(*std::move(copied));
    filled_bytes_ = 0;
    return absl::OkStatus();
  }

  CudaStaging* const staging_;
  TargetCursor cursor_{{}};  // where the next copy goes
  int64_t left_bytes_ = 0;   // announced and not appended
  PinnedPool::Block block_;
  int64_t filled_bytes_ = 0;  // of block_
  std::vector<EventRef> events_;
  bool finished_ = false;
};

class CudaDownload : public Download {
 public:
  explicit CudaDownload(std::shared_ptr<CudaDownloadState> state) : state_(std::move(state)) {}
  ~CudaDownload() override { state_->Close(); }

  absl::StatusOr<std::optional<HostRange>> Next(int64_t max_bytes) override {
    return state_->Next(max_bytes);
  }
  bool finished() const override { return state_->finished(); }
  absl::Duration copy_time() const override { return state_->copy_time(); }

 private:
  const std::shared_ptr<CudaDownloadState> state_;
};

// Host memory that is registered with the driver.
class CudaHostPin : public HostPin {
 public:
  CudaHostPin(CudaEventPool* events, void* data) : events_(events), data_(data) {}
  ~CudaHostPin() override {
    if (events_->UseDevice().ok()) (void)cudaHostUnregister(data_);
  }

 private:
  CudaEventPool* const events_;
  void* const data_;
};

PinnedPool::Source PinnedMemory(CudaEventPool* events) {
  return {[events](int64_t bytes) -> absl::StatusOr<void*> {
            absl::Status status = events->UseDevice();
            if (!status.ok()) return status;
            void* memory = nullptr;
            const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
            if (error == cudaErrorMemoryAllocation) {
              (void)cudaGetLastError();
              return absl::ResourceExhaustedError(
                  absl::StrCat("cannot pin ", bytes, " bytes of host memory for staging"));
            }
            status = CudaStatus(error, "cudaHostAlloc");
            if (!status.ok()) return status;
            return memory;
          },
          [](void* memory) { (void)cudaFreeHost(memory); }};
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaStaging>> CudaStaging::Create(CudaEventPool* events,
                                                                 int64_t pinned_bytes) {
  absl::StatusOr<std::shared_ptr<PinnedPool>> pool =
      PinnedPool::Create(pinned_bytes, kStagingBlockBytes, PinnedMemory(events));
  if (!pool.ok()) return pool.status();
  std::unique_ptr<CudaStaging> staging(new CudaStaging(events, *std::move(pool)));
  for (cudaStream_t* stream : {&staging->up_, &staging->down_}) {
    absl::Status status = CudaStatus(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking),
                                     "cudaStreamCreateWithFlags");
    if (!status.ok()) return status;
  }
  return staging;
}

CudaStaging::~CudaStaging() {
  if (!events_->UseDevice().ok()) return;
  for (cudaStream_t stream : {up_, down_}) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
}

absl::StatusOr<EventRef> CudaStaging::Copy(absl::Span<const DeviceCopy> copies, cudaMemcpyKind kind,
                                           cudaStream_t stream) {
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  auto event = std::make_shared<CudaEvent>(events_, nullptr, 0);
  status = event->RecordBegin(stream);
  if (!status.ok()) return status;
  bool under_way = false;
  for (const DeviceCopy& copy : copies) {
    status = CudaStatus(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, kind, stream),
                        "cudaMemcpyAsync");
    if (!status.ok()) break;
    under_way = true;
  }
  if (status.ok()) status = event->RecordEnd(stream);
  if (status.ok()) return event;
  // A copy is in flight and nothing reports its end, so the context is unusable.
  if (under_way) events_->ReportBroken(status);
  return status;
}

absl::StatusOr<EventRef> CudaStaging::CopyToDevice(absl::Span<const DeviceCopy> copies) {
  absl::MutexLock lock(&up_mutex_);
  return Copy(copies, cudaMemcpyHostToDevice, up_);
}

absl::StatusOr<EventRef> CudaStaging::CopyToHost(void* pinned, const void* source, int64_t bytes) {
  absl::MutexLock lock(&down_mutex_);
  return Copy({{pinned, source, bytes}}, cudaMemcpyDeviceToHost, down_);
}

absl::StatusOr<std::unique_ptr<HostPin>> CudaStaging::PinHost(void* data, int64_t bytes) {
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  const cudaError_t error = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // keeps the error from appearing in a later call
    return absl::ResourceExhaustedError(
        absl::StrCat("cudaHostRegister of ", bytes, " bytes: ", cudaGetErrorString(error)));
  }
  return std::make_unique<CudaHostPin>(events_, data);
}

std::unique_ptr<Upload> CudaStaging::BeginUpload(std::vector<UploadTarget> targets) {
  return std::make_unique<CudaUpload>(this, std::move(targets));
}

std::unique_ptr<Download> CudaStaging::BeginDownload(std::vector<DeviceRange> ranges,
                                                     std::function<void()> on_ready) {
  auto state = std::make_shared<CudaDownloadState>(this, std::move(ranges), std::move(on_ready));
  absl::MutexLock lock(&downloads_mutex_);
  downloads_.push_back(state);
  return std::make_unique<CudaDownload>(std::move(state));
}

CudaStaging::Downloads CudaStaging::AdvanceDownloads() {
  std::vector<std::shared_ptr<CudaDownloadState>> alive;
  {
    absl::MutexLock lock(&downloads_mutex_);
    const auto gone = [&alive](const std::weak_ptr<CudaDownloadState>& download) {
      std::shared_ptr<CudaDownloadState> state = download.lock();
      if (state != nullptr) alive.push_back(state);
      return state == nullptr;
    };
    downloads_.erase(std::remove_if(downloads_.begin(), downloads_.end(), gone), downloads_.end());
  }
  bool busy = false;
  for (const std::shared_ptr<CudaDownloadState>& state : alive) busy |= state->Advance();
  return busy ? Downloads::kBusy : alive.empty() ? Downloads::kNone : Downloads::kIdle;
}

}  // namespace ringattn::worker
