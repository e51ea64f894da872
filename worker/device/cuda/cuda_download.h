// CudaDownload: a Download that copies through pinned blocks, a few blocks ahead of its reader.
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

// Shared by the reader's CudaDownload and the thread that advances downloads, so that neither waits
// for the other. Thread safe.
class CudaDownloadState {
 public:
  CudaDownloadState(CudaStaging* staging, std::vector<DeviceRange> ranges,
                    std::function<void()> on_ready);

  absl::StatusOr<std::optional<Download::HostRange>> Next(int64_t max_bytes);
  bool finished() const;
  absl::Duration copy_time() const;

  // Enqueues at most one more copy, and notifies a waiting reader if it has something to read.
  // Returns true if there is more to do soon: the reader waits, or there is room for another copy.
  bool Advance();

  // After this returns, on_ready is not called and device memory is not read.
  void Close();

 private:
  struct Ahead {
    std::shared_ptr<PinnedPool::Block> block;
    size_t range;
    int64_t offset;  // in the range
    int64_t bytes;
    int64_t read_bytes;  // already returned to the reader
    EventRef copied;
  };

  absl::StatusOr<std::optional<Download::HostRange>> NextLocked(int64_t max_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Enqueues the next copy. Returns false if there is none, or no room or block for it.
  bool CopyNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SkipEmptyRanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CudaStaging* const staging_;
  const std::vector<DeviceRange> ranges_;

  // Held while the reader is notified, so that Close can wait for that.
  absl::Mutex notice_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::function<void()> on_ready_ ABSL_GUARDED_BY(notice_mutex_);

  mutable absl::Mutex mutex_;
  size_t range_ ABSL_GUARDED_BY(mutex_) = 0;  // of the next copy
  int64_t offset_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Ahead> ahead_ ABSL_GUARDED_BY(mutex_);
  bool reader_waits_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Duration copy_time_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_DOWNLOAD_H_
