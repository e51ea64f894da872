// CudaDownload: Download through pinned blocks, enqueued ahead of the reader.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_DOWNLOAD_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_DOWNLOAD_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/cuda/cuda_staging.h"

namespace ringattn::worker {

// Shared by the reader's CudaDownload and the thread that moves downloads on, so that
// neither has to wait for the other. Thread safe.
class CudaDownloadState {
 public:
  CudaDownloadState(CudaStaging* staging, std::vector<DeviceRange> ranges,
                    std::function<void()> on_ready);

  absl::StatusOr<std::optional<Download::HostRange>> Next(int64_t max_bytes);
  bool finished() const;
  absl::Duration copy_time() const;

  // Enqueues at most one more copy and tells the reader if it waits and has reason not to.
  // True if there is more to do soon: the reader waits, or there is room for a copy.
  bool Advance();

  // Afterwards on_ready is not called and the device's memory not read.
  void Close();

 private:
  struct Ahead {
    std::shared_ptr<PinnedPool::Block> block;
    size_t range;
    int64_t offset;  // in the range
    int64_t bytes;
    int64_t read_bytes;  // given to the reader
    EventRef copied;
  };

  // Enqueues the next copy. False if there is none, or no room or block for it.
  bool CopyNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SkipEmptyRanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CudaStaging* const staging_;
  const std::vector<DeviceRange> ranges_;

  // Held while the reader is told, so that Close can wait for that.
  absl::Mutex notice_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::function<void()> on_ready_ ABSL_GUARDED_BY(notice_mutex_);

  mutable absl::Mutex mutex_;
  size_t range_ ABSL_GUARDED_BY(mutex_) = 0;  // the next copy's
  int64_t offset_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Ahead> ahead_ ABSL_GUARDED_BY(mutex_);
  bool reader_waits_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Duration copy_time_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_DOWNLOAD_H_
