// RegionTransfer: the copies of one operation whose tensors lie in regions: this rank's shard of
// each input into the operation's buffers, and once it has computed, its shard of each output
// back.
#ifndef RINGATTN_WORKER_REGION_REGION_TRANSFER_H_
#define RINGATTN_WORKER_REGION_REGION_TRANSFER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/layout/tensor_route.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/device/staging.h"
#include "worker/operation/shard_operation.h"
#include "worker/region/copy_threads.h"
#include "worker/region/region.h"
#include "worker/region/work_count.h"

namespace ringattn::worker {

// What others learn of transfers. Called on copy threads, without locks.
struct TransferHooks {
  // All inputs are here: once. All outputs are where the client wants them: once.
  std::function<void(const OperationInfo&)> on_uploaded;
  std::function<void(const OperationInfo&)> on_delivered;
  // It cannot go on; `released`: because the client let go of a region. Once.
  std::function<void(const OperationInfo&, bool released, const std::string& why)> on_failed;
  // For metrics: tensor bytes copied, and what copying outputs from the device took.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  std::function<void(int64_t)> on_imported_in_bytes;  // of CUDA memory, instead of the two above
  std::function<void(int64_t)> on_imported_out_bytes;
  std::function<void(absl::Duration)> on_downloaded;
};

// Up and down have threads of their own: a device's staging memory that uploads wait for may be
// in the hands of downloads.
struct TransferThreads {
  CopyThreads* up = nullptr;
  CopyThreads* down = nullptr;
};

// Thread safe. Keeps itself alive while it copies; between copies its owner does, which has to keep
// it until `on_over`: the operation knows it as its listener.
class RegionTransfer final : public OperationListener,
                             public std::enable_shared_from_this<RegionTransfer> {
 public:
  using FindRegion = std::function<std::shared_ptr<Region>(const std::string& id)>;

  // A tensor's shard and where the whole tensor lies, or the one that it is a part of.
  struct Copied {
    TensorId id = TensorId::kQ;
    TensorRoute route;
    size_t part = 0;  // of route.parts()
    std::shared_ptr<Region> region;
    uint8_t* base = nullptr;  // of the whole tensor, in the region
    int64_t run_bytes = 0;    // of the shard's parts that are one in the tensor: about so many
    int64_t bytes = 0;        // of the whole tensor
    DeviceRange memory;       // of an output that is to be copied: the shard
    // The device copies by itself: its bytes in the region are a device's, or pinned where that
    // does better than staging.
    bool IsDirect() const;
    bool on_device() const { return region->on_device(); }
    bool long_runs() const;  // they are worth a copy of their own each
    // Of the shard, copied at a time: by threads through staging memory, and by the device itself.
    int64_t block_bytes() const;
    int64_t direct_block_bytes() const;
  };

  // `rank`: this worker's in the operation's ring. `hooks` and `threads` outlive it.
  // CANCELLED if a region is not here (any more); INVALID_ARGUMENT if a tensor has no place or
  // one that is not inside its region.
  static absl::StatusOr<std::shared_ptr<RegionTransfer>> Make(
      std::shared_ptr<ShardOperation> operation, const v1::Reserve& reserve, int rank,
      const FindRegion& find, const TransferHooks* hooks, TransferThreads threads);

  // Begins with the inputs; `on_over` follows once, when the operation has ended and nothing is
  // copied for it any more.
  void Start(std::function<void()> on_over);

  // The client has released a region: fails if it is one of this transfer's.
  void OnRegionGone(const Region& region);

  const OperationInfo& info() const { return operation_->info(); }
  // Those that it reads or writes.
  std::vector<std::shared_ptr<Region>> Regions() const;
  int64_t received_bytes() const { return received_bytes_.load(); }
  int64_t sent_bytes() const { return sent_bytes_.load(); }

  // OperationListener
  void OnOperationChanged() override;

 private:
  struct Block {
    size_t tensor = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
    bool direct = false;
  };

  RegionTransfer(std::shared_ptr<ShardOperation> operation, int rank, uint64_t fence_number,
                 const TransferHooks* hooks, TransferThreads threads)
      : operation_(std::move(operation)),
        rank_(rank),
        fence_number_(fence_number),
        hooks_(hooks),
        threads_(threads),
        work_([this] { return !operation_->ended().ok(); }) {}

  // One piece of work on a copy thread each.
  void CopyIn();
  void CopyOut();
  void Proceed();

  std::optional<Block> NextInput() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CopyInput(const Block& block);
  absl::StatusOr<std::vector<EventRef>> StartDirectOutput(const Block& block);
  void CountIn(const Copied& input, int64_t bytes);
  void CountOut(const Copied& output, int64_t bytes);
  absl::StatusOr<std::optional<Download::HostRange>> NextOutput() ABSL_LOCKS_EXCLUDED(mutex_);
  size_t StagedOutput(size_t range) ABSL_LOCKS_EXCLUDED(mutex_);
  // False if the region is not to be written any more. Less is copied where the transfer stops.
  bool CopyOutput(size_t index, const Download::HostRange& piece, int64_t* copied_bytes);
  std::optional<Block> NextDirectOutput() ABSL_LOCKS_EXCLUDED(mutex_);
  // False: nothing may be written any more.
  absl::StatusOr<bool> CopyDirectOutput(const Block& block) ABSL_LOCKS_EXCLUDED(mutex_);
  // False: as CopyDirectOutput.
  absl::StatusOr<bool> FillHoles(const Copied& output);
  void FinishDownload() ABSL_LOCKS_EXCLUDED(mutex_);
  void Fail(bool released, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Stopped() const { return failed_.load() || !operation_->ended().ok(); }
  void AddUp(void (RegionTransfer::*work)());
  void AddDown(void (RegionTransfer::*work)());
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<ShardOperation> operation_;
  const int rank_;
  const uint64_t fence_number_;
  const TransferHooks* const hooks_;
  const TransferThreads threads_;
  WorkCount work_;               // asks the operation, which calls its listener without its lock
  std::vector<Copied> inputs_;   // fixed by Make
  std::vector<Copied> outputs_;  // likewise, in the order of ShardOperation::Outputs
  std::atomic<int64_t> received_bytes_{0};
  std::atomic<int64_t> sent_bytes_{0};
  std::atomic<bool> failed_{false};

  absl::Mutex mutex_;
  Block next_input_ ABSL_GUARDED_BY(mutex_);
  // Outputs that a download stages, and those that the device copies by itself.
  std::vector<size_t> staged_ ABSL_GUARDED_BY(mutex_);
  std::vector<size_t> direct_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Download> download_ ABSL_GUARDED_BY(mutex_);  // null: nothing is staged
  Block next_direct_ ABSL_GUARDED_BY(mutex_);                   // `tensor` counts in direct_
  absl::Duration direct_copy_time_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_down_ ABSL_GUARDED_BY(mutex_) = 0;
  bool downloading_ ABSL_GUARDED_BY(mutex_) = false;
  bool delivered_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> on_over_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_TRANSFER_H_
