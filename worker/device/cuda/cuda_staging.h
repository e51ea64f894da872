// CudaStaging: moves tensor bytes between the wire and a device through the pinned pool, on one
// copy stream per direction, so that network, copies and compute overlap.
//
//   up    wire slices -> pinned block -> copy stream -> device; the copy's event returns
//         the block, and compute waits for the event
//   down  device -> copy stream -> pinned block, a few blocks ahead of the reader; the
//         block is returned when the reader (gRPC) releases it
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_STAGING_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_STAGING_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/pinned_pool.h"
#include "worker/device/host_pin.h"
#include "worker/device/imported_memory.h"
#include "worker/device/staging.h"

namespace ringattn::worker {

// Copies of 4 MiB run at the link's full rate (55 GB/s) and take 80 us.
inline constexpr int64_t kStagingBlockBytes = int64_t{4} << 20;

class CudaDownloadState;

// Thread safe. Must outlive its uploads and downloads.
class CudaStaging {
 public:
  static absl::StatusOr<std::unique_ptr<CudaStaging>> Create(CudaEventPool* events,
                                                             int64_t pinned_bytes);
  ~CudaStaging();
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  // See Device::BeginUpload and Device::BeginDownload.
  std::unique_ptr<Upload> BeginUpload(std::vector<UploadTarget> targets);
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready);

  // See Device::PinHost.
  absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes);

  // Advances every download by one block in turn and notifies waiting readers. The service thread
  // calls it repeatedly while there are downloads.
  enum class Downloads { kNone, kIdle, kBusy };
  Downloads AdvanceDownloads();

  // Called when a reader of a download begins to wait for a copy, on the reader's thread and
  // without locks. It must lead to AdvanceDownloads() soon. Set it before the first download.
  void SetOnReaderWaits(std::function<void()> on_reader_waits) {
    on_reader_waits_ = std::move(on_reader_waits);
  }
  void OnReaderWaits() const { on_reader_waits_(); }

  int64_t used_bytes() const { return pool_->used_bytes(); }

  // Copies between pinned and device memory. Returns one event for all of them.
  absl::StatusOr<EventRef> CopyToDevice(absl::Span<const DeviceCopy> copies);
  absl::StatusOr<EventRef> CopyToHost(void* pinned, const void* source, int64_t bytes);
  const std::shared_ptr<PinnedPool>& pool() const { return pool_; }

 private:
  CudaStaging(CudaEventPool* events, std::shared_ptr<PinnedPool> pool)
      : events_(events), pool_(std::move(pool)) {}
  absl::StatusOr<EventRef> Copy(absl::Span<const DeviceCopy> copies, cudaMemcpyKind kind,
                                cudaStream_t stream);

  CudaEventPool* const events_;
  const std::shared_ptr<PinnedPool> pool_;
  std::function<void()> on_reader_waits_ = [] {};
  // A copy and its two events are enqueued under one lock, so that they time only that copy.
  absl::Mutex up_mutex_, down_mutex_;
  cudaStream_t up_ = nullptr, down_ = nullptr;

  absl::Mutex downloads_mutex_;
  std::vector<std::weak_ptr<CudaDownloadState>> downloads_ ABSL_GUARDED_BY(downloads_mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_STAGING_H_
