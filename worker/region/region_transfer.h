// RegionTransfer: copies the tensors of one operation from and to regions: this rank's shard of
// each input into the operation's buffers and, after the run, its shard of each output back.
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
#include "worker/operation/operation_writers.h"
#include "worker/operation/shard_operation.h"
#include "worker/region/copy_threads.h"
#include "worker/region/region.h"
#include "worker/region/work_count.h"

namespace ringattn::worker {

// Called on copy threads, without locks.
struct TransferHooks {
  // on_uploaded: all inputs have been copied. on_delivered: all outputs have been copied. Once
  // each.
  std::function<void(const OperationInfo&)> on_uploaded;
  std::function<void(const OperationInfo&)> on_delivered;
  // The transfer has failed. `released`: the client released a region. Called once.
  std::function<void(const OperationInfo&, bool released, const std::string& why)> on_failed;
  // For metrics: tensor bytes copied, and the time of copying outputs from the device.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  std::function<void(int64_t)> on_imported_in_bytes;  // for CUDA memory, instead of the two above
  std::function<void(int64_t)> on_imported_out_bytes;
  std::function<void(absl::Duration)> on_downloaded;
};

// Each direction has its own threads: uploads may wait for staging memory that downloads hold.
struct TransferThreads {
  CopyThreads* up = nullptr;
  CopyThreads* down = nullptr;
};

// Thread safe. Keeps itself alive during a copy. Its owner must keep it until `on_over` is called,
// because the operation refers to it as its listener.
class RegionTransfer final : public OperationListener,
                             public std::enable_shared_from_this<RegionTransfer> {
 public:
  using FindRegion = std::function<std::shared_ptr<Region>(const std::string& id)>;

  // A client's tensor in a region: the whole tensor, or a writer's rows of it.
  struct Location {
    std::shared_ptr<Region> region;
    uint8_t* base = nullptr;
    int64_t bytes = 0;
    uint64_t fence_number = 0;
  };

  // The shard of a tensor, and the locations of the client's tensor. For a packed tensor that is
  // the tensor of which this one is a part.
  struct TensorCopy {
    TensorId id = TensorId::kQ;
    TensorRoute route;
    size_t part = 0;                  // index in route.parts()
    std::vector<Location> locations;  // by writer; one if the clients hold the whole tensor
    std::optional<ShardMap> writers;  // from the whole tensor to the locations; none: all are whole
    int64_t run_bytes = 0;  // approximate length of the shard's contiguous runs in the locations
    DeviceRange memory;     // outputs only: the shard in device memory

    // Returns the runs for a range of the shard, ascending in the shard. ByteRun::rank is the index
    // of the location, and global_offset is in its tensor. If all locations are whole, the runs are
    // those of the first.
    std::vector<ByteRun> Runs(int rank, int64_t offset, int64_t bytes) const;
    // The same for an output: if all locations are whole, the runs of each, one after another.
    std::vector<ByteRun> OutputRuns(int rank, int64_t offset, int64_t bytes) const;
    // Splits runs where pins of their regions end (Region::kPinBytes).
    std::vector<ByteRun> WithinPins(const std::vector<ByteRun>& runs) const;
    uint8_t* AddressOf(const ByteRun& run) const {
      return locations[run.rank].base + run.global_offset;
    }
    bool released() const;  // one of the regions is
    // Region::BeginWrite and EndWrite for all locations.
    bool BeginWrite() const;
    void EndWrite() const;
    // Whether the device copies directly, without staging: for CUDA memory, and for pinned memory
    // if that is faster.
    bool IsDirect() const;
    bool on_device() const { return locations[0].region->on_device(); }
    bool is_pinned() const;  // all locations are
    bool long_runs() const;  // runs are worth a separate copy each
    // How much of the shard is copied at a time: by threads through staging memory, or directly by
    // the device.
    int64_t block_bytes() const;
    int64_t direct_block_bytes() const;
  };

  // Makes the transfer of an operation's shard. `hooks` and `threads` must outlive
  // it. Errors:
  //   CANCELLED         a region is not attached (any more)
  //   INVALID_ARGUMENT  a tensor has no place, or its place is not within its region
  static absl::StatusOr<std::shared_ptr<RegionTransfer>> Make(
      std::shared_ptr<ShardOperation> operation, const v1::Reserve& reserve, const FindRegion& find,
      const TransferHooks* hooks, TransferThreads threads);

  // --- Inline operations: the calling thread copies, without Start. region_transfer_inline.cc
  // Returns whether the device can copy all tensors in few pieces and without staging memory.
  // `host`: of a device that is_host_memory(), which must not copy much on the calling thread.
  bool IsInline(bool host) const;
  // Copies the inputs, or starts to: the program waits for the rest. Errors:
  //   CANCELLED  the client has released a region
  absl::Status CopyInputsInline(bool host);
  // Copies the outputs before it returns. Returns false if the client has released or fenced a
  // region. REQUIRES: the operation has finished.
  absl::StatusOr<bool> CopyOutputsInline(bool host);

  // Starts with the inputs. Calls `on_over` once, when the operation has ended and no copy for it
  // is in progress.
  void Start(std::function<void()> on_over);

  // The client has released `region`: fails the transfer if it uses the region.
  void OnRegionGone(const Region& region);

  const OperationInfo& info() const { return operation_->info(); }
  // The regions that the transfer reads or writes.
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

  RegionTransfer(std::shared_ptr<ShardOperation> operation, const TransferHooks* hooks,
                 TransferThreads threads)
      : operation_(std::move(operation)),
        rank_(operation_->operation().program().rank),
        hooks_(hooks),
        threads_(threads),
        work_([this] { return !operation_->ended().ok(); }) {}

  // Each does one piece of work on a copy thread.
  void CopyIn();
  void CopyOut();
  void Proceed();

  std::optional<Block> NextInput() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CopyInput(const Block& block);
  absl::StatusOr<std::vector<EventRef>> StartDirectOutput(const Block& block);
  absl::Status CopyOutputInline(size_t index, bool host, std::vector<EventRef>* copies);
  void CountIn(const TensorCopy& input, int64_t bytes);
  void CountOut(const TensorCopy& output, int64_t bytes);
  absl::StatusOr<std::optional<Download::HostRange>> NextOutput() ABSL_LOCKS_EXCLUDED(mutex_);
  size_t StagedOutput(size_t range) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if the region must not be written any more. Copies less if the transfer is
  // stopping.
  bool CopyOutput(size_t index, const Download::HostRange& piece, int64_t* copied_bytes);
  std::optional<Block> NextDirectOutput() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if nothing may be written any more.
  absl::StatusOr<bool> CopyDirectOutput(const Block& block) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if nothing may be written any more.
  absl::StatusOr<bool> FillHoles(const TensorCopy& output);
  void FinishDownload() ABSL_LOCKS_EXCLUDED(mutex_);
  void Fail(bool released, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Stopped() const { return failed_.load() || !operation_->ended().ok(); }
  void AddUp(void (RegionTransfer::*work)());
  void AddDown(void (RegionTransfer::*work)());
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<ShardOperation> operation_;
  const int rank_;
  const TransferHooks* const hooks_;
  const TransferThreads threads_;
  WorkCount work_;  // reads the operation's state, which notifies its listener without its own lock
  std::vector<TensorCopy> inputs_;   // constant after Make
  std::vector<TensorCopy> outputs_;  // constant after Make; in the order of ShardOperation::Outputs
  std::atomic<int64_t> received_bytes_{0};
  std::atomic<int64_t> sent_bytes_{0};
  std::atomic<bool> failed_{false};

  absl::Mutex mutex_;
  Block next_input_ ABSL_GUARDED_BY(mutex_);
  // Outputs that a download stages, and outputs that the device copies directly.
  std::vector<size_t> staged_ ABSL_GUARDED_BY(mutex_);
  std::vector<size_t> direct_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Download> download_ ABSL_GUARDED_BY(mutex_);  // null: nothing is staged
  Block next_direct_ ABSL_GUARDED_BY(mutex_);                   // `tensor` is an index in direct_
  absl::Duration direct_copy_time_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_down_ ABSL_GUARDED_BY(mutex_) = 0;
  bool downloading_ ABSL_GUARDED_BY(mutex_) = false;
  bool delivered_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> on_over_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_TRANSFER_H_
