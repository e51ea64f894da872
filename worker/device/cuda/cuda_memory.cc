#include "worker/device/cuda/cuda_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

// Mapping tens of gigabytes, or copying a few bytes, takes milliseconds.
constexpr absl::Duration kBound = absl::Minutes(1);
// The alignment of CUDA's own allocations.
constexpr int64_t kAlignment = 256;
// Regions grow by half of their total up to ahead_bytes, in multiples of at least this. That keeps
// their number small and their pages large; mapping costs time per page.
constexpr int64_t kRegionUnit = int64_t{1} << 30;
// The unit if memory is short.
constexpr int64_t kPage = int64_t{2} << 20;

// How old device_used_bytes may be when memory is allocated or freed.
constexpr int64_t kUsageIntervalNanos = 20'000'000;

// For the outputs of an inline operation.
constexpr int64_t kBounceBytes = kMaxInlineRunBytes;

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

class CudaMemory::Buffer : public DeviceBuffer {
 public:
  Buffer(CudaMemory* memory, void* data, int64_t bytes)
      : memory_(memory), data_(data), bytes_(bytes) {}
  ~Buffer() override {
    if (data_ == nullptr || !memory_->events_->UseDevice().ok()) return;
    memory_->Free(data_);
    memory_->Count(-bytes_);
  }

  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  CudaMemory* const memory_;
  void* const data_;
  const int64_t bytes_;
};

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Create(CudaEventPool* events,
                                                               bool in_regions, int64_t ahead_bytes,
                                                               RegionSharing sharing) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(events, in_regions, ahead_bytes));
  absl::Status status = events->UseDevice();
  if (!status.ok()) return status;
  status = CudaStatus(cudaStreamCreateWithFlags(&memory->stream_, cudaStreamNonBlocking),
                      "cudaStreamCreateWithFlags");
  if (!status.ok()) return status;
  void* bounce = nullptr;
  status = CudaStatus(cudaHostAlloc(&bounce, kBounceBytes, cudaHostAllocDefault), "cudaHostAlloc");
  if (!status.ok()) return status;
  memory->bounce_ = static_cast<char*>(bounce);
  status = in_regions ? memory->UseRegions(sharing) : memory->UsePool();
  if (!status.ok()) return status;
  return memory;
}

absl::Status CudaMemory::UseRegions(RegionSharing sharing) {
  absl::MutexLock growing(&growing_);
  if (sharing == RegionSharing::kIpc) return AddRegion(kRegionUnit);
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  absl::Status status = driver.status();
  if (status.ok()) status = VmmRegion::CheckSupport(**driver, events_->device());
  if (status.ok()) {
    vmm_driver_ = *driver;
    status = AddRegion(kRegionUnit);  // also checks that this process may use such memory
  }
  if (!absl::IsFailedPrecondition(status) || sharing == RegionSharing::kVmm) return status;
  vmm_driver_ = nullptr;
  why_not_vmm_ = std::string(status.message());
  return AddRegion(kRegionUnit);
}

absl::StatusOr<CudaMemory::Region> CudaMemory::NewVmmRegion(int64_t bytes) const {
  absl::StatusOr<std::unique_ptr<VmmRegion>> made = VmmRegion::Create(events_, vmm_driver_, bytes);
  if (!made.ok()) return made.status();
  const DeviceRegion memory{(*made)->data(), (*made)->bytes(), (*made)->descriptor()};
  return Region{memory, ExtentAllocator(memory.bytes, kAlignment), *std::move(made)};
}

absl::StatusOr<CudaMemory::Region> CudaMemory::NewLinearRegion(int64_t bytes) const {
  void* base = nullptr;
  const cudaError_t error = cudaMalloc(&base, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return absl::ResourceExhaustedError("cudaMalloc");
  }
  if (absl::Status status = CudaStatus(error, "cudaMalloc"); !status.ok()) return status;
  return Region{{static_cast<char*>(base), bytes}, ExtentAllocator(bytes, kAlignment), nullptr};
}

absl::Status CudaMemory::AddRegion(int64_t bytes) {
  absl::StatusOr<Region> region =
      vmm_driver_ != nullptr ? NewVmmRegion(bytes) : NewLinearRegion(bytes);
  if (absl::IsResourceExhausted(region.status())) return NoRoomFor(bytes);
  if (!region.ok()) return region.status();
  absl::MutexLock lock(&mutex_);
  regions_.push_back(*std::move(region));
  return absl::OkStatus();
}

absl::Status CudaMemory::NoRoomFor(int64_t bytes) const {
  const int64_t on_device = device_free_bytes();
  absl::MutexLock lock(&mutex_);
  int64_t total = 0, free = 0, largest = 0;
  for (const Region& region : regions_) {
    total += region.memory.bytes;
    free += region.extents.free_bytes();
    largest = std::max(largest, region.extents.largest_free_bytes());
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot allocate ", bytes, " bytes on CUDA device ", events_->device(), ": ",
                   on_device, " are free; of the ", total, " for requests, ", free, " are free, ",
                   largest, " of them contiguous"));
}

absl::Status CudaMemory::UsePool() {
  absl::Status status = CudaStatus(cudaDeviceGetDefaultMemPool(&pool_, events_->device()),
                                   "cudaDeviceGetDefaultMemPool");
  if (!status.ok()) return status;
  uint64_t keep_everything = UINT64_MAX;
  return CudaStatus(
      cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_everything),
      "cudaMemPoolSetAttribute");
}

CudaMemory::~CudaMemory() {
  if (stream_ == nullptr || !events_->UseDevice().ok()) return;
  (void)cudaStreamDestroy(stream_);
  (void)cudaFreeHost(bounce_);
  absl::MutexLock lock(&mutex_);
  for (const Region& region : regions_) {
    if (region.vmm == nullptr) (void)cudaFree(region.memory.base);
  }
}

std::vector<DeviceRegion> CudaMemory::regions() const {
  absl::MutexLock lock(&mutex_);
  std::vector<DeviceRegion> regions;
  for (const Region& region : regions_) regions.push_back(region.memory);
  return regions;
}

absl::StatusOr<std::unique_ptr<DeviceBuffer>> CudaMemory::Allocate(int64_t bytes) {
  if (bytes == 0) return std::make_unique<Buffer>(this, nullptr, 0);
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  absl::StatusOr<void*> data = in_regions_ ? FromRegions(bytes) : FromPool(bytes);
  if (!data.ok()) return data.status();
  auto buffer = std::make_unique<Buffer>(this, *data, bytes);
  Count(bytes);
  if (in_regions_) return buffer;
  // From here on the memory may be used in any stream.
  status = WaitForStream();
  if (!status.ok()) return status;
  return buffer;
}

absl::StatusOr<void*> CudaMemory::FromRegions(int64_t bytes) {
  if (const std::optional<void*> data = FromOneOf(bytes); data.has_value()) return *data;
  absl::MutexLock growing(&growing_);
  while (true) {
    // Another thread may have added a region meanwhile, or used part of the new one.
    if (const std::optional<void*> data = FromOneOf(bytes); data.has_value()) return *data;
    if (absl::Status status = Grow(bytes); !status.ok()) return status;
  }
}

absl::Status CudaMemory::Grow(int64_t bytes) {
  int64_t total = 0;
  for (const DeviceRegion& region : regions()) total += region.bytes;
  const int64_t ahead =
      std::min(RoundUp(total / 2, kRegionUnit), (ahead_bytes_ - total) / kRegionUnit * kRegionUnit);
  absl::Status status = AddRegion(RoundUp(std::max({bytes, ahead, kRegionUnit}), kRegionUnit));
  if (absl::IsResourceExhausted(status)) status = AddRegion(RoundUp(bytes, kPage));
  return status;
}

std::optional<void*> CudaMemory::FromOneOf(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  for (Region& region : regions_) {
    const std::optional<int64_t> offset = region.extents.Take(bytes);
    if (offset.has_value()) return region.memory.base + *offset;
  }
  return std::nullopt;
}

absl::StatusOr<void*> CudaMemory::FromPool(int64_t bytes) {
  void* data = nullptr;
  cudaError_t error = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
  if (error == cudaErrorMemoryAllocation) {
    // The pool may hold free memory in pieces of the wrong size.
    (void)cudaGetLastError();
    (void)cudaMemPoolTrimTo(pool_, 0);
    error = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
  }
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot allocate ", bytes, " bytes on CUDA device ", events_->device(), ": ",
        device_free_bytes(), " are free, ", allocated_bytes(), " are held by other operations"));
  }
  if (absl::Status status = CudaStatus(error, "cudaMallocFromPoolAsync"); !status.ok()) {
    return status;
  }
  return data;
}

void CudaMemory::Free(void* data) {
  if (!in_regions_) {
    (void)cudaFreeAsync(data, stream_);
    return;
  }
  absl::MutexLock lock(&mutex_);
  for (Region& region : regions_) {
    if (!region.memory.Contains(data, 1)) continue;
    region.extents.Give(static_cast<char*>(data) - region.memory.base);
    return;
  }
}

absl::Status CudaMemory::WaitForStream() {
  CudaEvent reached(events_, nullptr, 0);
  absl::Status status = reached.RecordEnd(stream_);
  if (!status.ok()) return status;
  return reached.Wait(MonotonicNow() + kBound);
}

absl::Status CudaMemory::Copy(void* target, const void* source, int64_t bytes,
                              cudaMemcpyKind kind) {
  if (bytes == 0) return absl::OkStatus();
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  status = CudaStatus(cudaMemcpyAsync(target, source, bytes, kind, stream_), "cudaMemcpyAsync");
  if (!status.ok()) return status;
  return WaitForStream();
}

absl::Status CudaMemory::CopyFromHost(void* device, const void* host, int64_t bytes) {
  return Copy(device, host, bytes, cudaMemcpyHostToDevice);
}

absl::Status CudaMemory::CopyToHost(void* host, const void* device, int64_t bytes) {
  return Copy(host, device, bytes, cudaMemcpyDeviceToHost);
}

absl::StatusOr<EventRef> CudaMemory::StartCopyFromHost(void* device, const void* host,
                                                       int64_t bytes) {
  if (bytes == 0) return EventRef();
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  status = CudaStatus(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_),
                      "cudaMemcpyAsync");
  if (!status.ok()) return status;
  auto event = std::make_shared<CudaEvent>(events_, nullptr, 0);
  status = event->RecordEnd(stream_);
  if (status.ok()) return event;
  // The copy is in flight and nothing reports its end, so the context is unusable.
  events_->ReportBroken(status);
  return status;
}

absl::Status CudaMemory::CopyAllToHost(absl::Span<const DeviceCopy> copies) {
  int64_t bytes = 0;
  for (const DeviceCopy& copy : copies) bytes += copy.bytes;
  absl::Status status = events_->UseDevice();
  if (bytes > kBounceBytes) {
    for (const DeviceCopy& copy : copies) {
      if (status.ok()) status = CopyToHost(copy.to, copy.from, copy.bytes);
    }
    return status;
  }
  absl::MutexLock lock(&bounce_mutex_);
  char* place = bounce_;
  for (const DeviceCopy& copy : copies) {
    if (!status.ok()) break;
    if (copy.bytes == 0) continue;
    status =
        CudaStatus(cudaMemcpyAsync(place, copy.from, copy.bytes, cudaMemcpyDeviceToHost, stream_),
                   "cudaMemcpyAsync");
    place += copy.bytes;
  }
  // After a failure too, because the copies before it write to the pinned memory.
  status.Update(WaitForStream());
  if (!status.ok()) return status;
  place = bounce_;
  for (const DeviceCopy& copy : copies) {
    std::memcpy(copy.to, place, copy.bytes);
    place += copy.bytes;
  }
  return absl::OkStatus();
}

void CudaMemory::Count(int64_t bytes) {
  allocated_bytes_ += bytes;
  // An operation allocates and frees a dozen buffers at once, and the driver's query is slow.
  const int64_t now = absl::GetCurrentTimeNanos();
  int64_t asked = asked_at_.load();
  if (now - asked < kUsageIntervalNanos || !asked_at_.compare_exchange_strong(asked, now)) return;
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
    device_used_bytes_ = static_cast<int64_t>(total - free);
  }
}

int64_t CudaMemory::device_free_bytes() const {
  size_t free = 0, total = 0;
  if (!events_->UseDevice().ok() || cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  return static_cast<int64_t>(free);
}

}  // namespace ringattn::worker
