// PinnedPool: a fixed set of equal blocks of pinned host memory between the wire and a device.
// Pinning is slow and pinned memory is scarce, so it is allocated once. An exhausted pool slows
// fast clients down.
//
// Uploads queue for blocks and get one per turn, so that a stream with many bytes cannot starve
// others. Uploads hold at most three quarters of the blocks and downloads at most half, so neither
// can stop the other. The second half of the downloads' share is reserved for downloads that have
// nothing to send. Otherwise blocks copied ahead for readers that do not read would stop all other
// downloads.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_PINNED_POOL_H_
#define RINGATTN_WORKER_DEVICE_CUDA_PINNED_POOL_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// Thread safe. Blocks keep the pool alive.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // Allocates the pool's memory; `free` gets what `allocate` returned.
  struct Source {
    std::function<absl::StatusOr<void*>(int64_t bytes)> allocate;
    std::function<void(void*)> free;
  };

  // Returned to the pool on destruction. Movable.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(index_, other.index_);
      std::swap(download_, other.download_);
      return *this;
    }
    ~Block();

    explicit operator bool() const { return pool_ != nullptr; }
    uint8_t* data() const;
    int64_t bytes() const;

   private:
    friend class PinnedPool;
    Block(std::shared_ptr<PinnedPool> pool, int index, bool download)
        : pool_(std::move(pool)), index_(index), download_(download) {}

    std::shared_ptr<PinnedPool> pool_;
    int index_ = 0;
    bool download_ = false;
  };

  // Creates total_bytes / block_bytes blocks. Returns INVALID_ARGUMENT if these are fewer than
  // four, or the error of the source.
  static absl::StatusOr<std::shared_ptr<PinnedPool>> Create(int64_t total_bytes,
                                                            int64_t block_bytes, Source source);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Returns a block for an upload, in the order of the calls. Returns UNAVAILABLE if there is none
  // by `deadline`.
  absl::StatusOr<Block> TakeForUpload(absl::Time deadline);

  // Returns a block for a download if one is available now. `ahead`: the reader has not finished
  // the previous block.
  std::optional<Block> TryTakeForDownload(bool ahead);

  // Returns the block to the pool once `copied` is done.
  void ReturnAfter(Block block, EventRef copied);

  int64_t block_bytes() const { return block_bytes_; }
  int64_t block_count() const { return block_count_; }
  int64_t used_bytes() const;

 private:
  struct Copying {
    int index;
    bool download;
    EventRef copied;
  };

  PinnedPool(int64_t block_bytes, int block_count, Source source);

  void Return(int index, bool download) ABSL_LOCKS_EXCLUDED(mutex_);
  void PutBack(int index, bool download) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CollectCopied() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t block_bytes_;
  const int block_count_;
  const Source source_;
  uint8_t* memory_ = nullptr;

  mutable absl::Mutex mutex_;
  absl::CondVar changed_;
  std::vector<int> free_ ABSL_GUARDED_BY(mutex_);
  std::list<Copying> copying_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> waiting_ ABSL_GUARDED_BY(mutex_);  // turns; the lowest is next
  uint64_t next_turn_ ABSL_GUARDED_BY(mutex_) = 0;
  int upload_blocks_ ABSL_GUARDED_BY(mutex_) = 0;  // includes blocks that are being copied
  int download_blocks_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_PINNED_POOL_H_
