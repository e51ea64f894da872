// ShardOperation: one operation on this worker: its buffers, how much of its inputs has arrived,
// and its state.
#ifndef RINGATTN_WORKER_OPERATION_SHARD_OPERATION_H_
#define RINGATTN_WORKER_OPERATION_SHARD_OPERATION_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/byte_range_set.h"
#include "common/wire/chunk_codec.h"
#include "worker/device/device.h"
#include "worker/executor/executor.h"
#include "worker/operation/kept_operations.h"
#include "worker/operation/memory_budget.h"
#include "worker/operation/packed_input.h"
#include "worker/operation/residual.h"

namespace ringattn::worker {

// Called whenever the operation's state changes. The only lock held is the one that prevents the
// listener from being removed meanwhile.
class OperationListener {
 public:
  virtual ~OperationListener() = default;
  virtual void OnOperationChanged() = 0;
};

// How a run starts.
struct RunStart {
  std::optional<absl::Duration> preempt_after;  // Run.preempt_after; unset: it does not preempt
};

struct OperationInfo {
  std::string id;
  uint64_t generation = 0;
  bool with_timeline = false;
  // For logs.
  std::string request_id = {};
  std::string traceparent = {};  // empty: none
  // Under which to keep the operation for equal requests (KeptOperations). Null: not kept.
  std::shared_ptr<const std::string> recipe = nullptr;
  // Set: it runs as soon as its inputs are complete (Reserve.run_when_uploaded).
  std::optional<RunStart> run_when_uploaded = std::nullopt;
};

// Thread safe. Shared by the registry, the runner, the open exchange and every slice of its buffers
// that gRPC still sends. The last owner frees the memory.
class ShardOperation {
 public:
  // An output tensor of the program, or a range of one.
  struct Output {
    TensorId id;
    DeviceRange memory;
    int64_t offset = 0;  // of `memory` in the rank's tensor
  };
  // When copies to the device began and ended, and the sum of their durations.
  struct CopyTimes {
    absl::Time begin = absl::InfiniteFuture();
    absl::Time end = absl::InfinitePast();
    absl::Duration total;
  };

  // Takes over what was prepared, when nothing uses it any more. `ended_well`: its run succeeded,
  // so that it may run again.
  using DestroyedCallback = std::function<void(PreparedOperation prepared, bool ended_well)>;

  // `device` must outlive the operation.
  ShardOperation(OperationInfo info, PreparedOperation prepared, Device* device,
                 DestroyedCallback on_destroyed);
  ~ShardOperation();

  ShardOperation(const ShardOperation&) = delete;
  ShardOperation& operator=(const ShardOperation&) = delete;

  const OperationInfo& info() const { return info_; }
  Operation& operation() { return *operation_; }
  int64_t reserved_bytes() const { return reservation_.bytes(); }

  // --- inputs
  // Copies one chunk into its input buffer. The caller may reuse the payload on return. A chunk of
  // a packed tensor may belong to the packed tensor or to one of its parts (PackedInput). Errors:
  //   INVALID_ARGUMENT    not an input, outside the shard, overlaps, or fails its crc
  //   RESOURCE_EXHAUSTED  the tensor arrived in too many ranges (kMaxRangesPerTensor)
  absl::Status Write(const wire::ChunkHeader& chunk, absl::Span<const wire::Fragment> payload,
                     uint64_t payload_bytes);
  // Like Write, for a few hundred KiB, without staging memory (MakeSmallUpload). The payload must
  // stay valid until PendingUploads() have ended.
  absl::Status WriteSmall(const wire::ChunkHeader& chunk, absl::Span<const wire::Fragment> payload,
                          uint64_t payload_bytes);
  // When a function returns whose payload the device reads. After kAtOnce the memory must stay
  // valid until the operation is destroyed, and unchanged until its run has ended.
  enum class Returns : uint8_t { kAtOnce, kWhenRead };
  // Like Write, for pinned memory that the device reads directly (Device::PinHost). Each fragment
  // must lie within one pin, and the chunk must not belong to a packed tensor.
  absl::Status WritePinned(const wire::ChunkHeader& chunk, absl::Span<const wire::Fragment> payload,
                           uint64_t payload_bytes, Returns returns);
  // Like WritePinned, for a client's CUDA memory (Device::ImportMemory). REQUIRES: the chunk has no
  // crc.
  absl::Status WriteImported(const wire::ChunkHeader& chunk,
                             absl::Span<const wire::Fragment> payload, uint64_t payload_bytes,
                             Returns returns);
  bool InputsComplete() const;
  // Returns true to the first caller after the inputs are complete.
  bool TakeUploadedNotice();
  absl::Time reserved_time() const { return reserved_time_; }
  // Time of the last input byte.
  absl::Time uploaded_time() const;
  // Returns the uploads that the program must wait for before it reads inputs. REQUIRES: complete.
  std::vector<EventRef> PendingUploads() const;
  // All zero on devices that compute in host memory. Final once the program has ended.
  CopyTimes upload_copies() const;

  // --- outputs
  std::vector<Output> Outputs() const;
  // Returns the same bytes in the order in which they are streamed (shard.proto).
  std::vector<Output> StreamedOutputs() const;
  // Starts copying outputs, or ranges of them, to the host (Device::BeginDownload). REQUIRES:
  // finished.
  std::unique_ptr<Download> BeginDownload(const std::vector<Output>& outputs,
                                          std::function<void()> on_ready) const;
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) const;

  // Copies a range of an output into pinned memory (Device::CopyToPinned). REQUIRES: finished.
  absl::StatusOr<EventRef> CopyToPinned(void* pinned, DeviceRange part) const;

  // Copies ranges of outputs into a client's CUDA memory (Device::CopyImported). REQUIRES:
  // finished.
  absl::StatusOr<EventRef> CopyToImported(absl::Span<const DeviceCopy> pieces) const;
  // Copies a few bytes into or from device memory, synchronously.
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) const;
  absl::Status CopyAllToHost(absl::Span<const DeviceCopy> copies) const;

  // Returns the residual for a later backward, together with its share of the reserved memory. Call
  // once, from the control thread. Returns null unless the operation has finished successfully.
  // REQUIRES: the program keeps its inputs.
  std::shared_ptr<const Residual> TakeResidual();

  // --- lifecycle
  // The program has ended successfully, so outputs can be read.
  void SetFinished();
  // Ends the operation: it was released, it failed, or its generation ended. The exchange ends with
  // `why` and the program stops. Only the first call has an effect.
  void End(absl::Status why);
  bool finished() const;
  // OK until End is called.
  absl::Status ended() const;

  // Returns false if there is a listener already.
  bool SetListener(OperationListener* listener);
  void RemoveListener();

 private:
  struct Input {
    DeviceBuffer* buffer = nullptr;
    ByteRangeSet arrived{0};
  };

  // Destinations of a chunk: one input, or each part of a packed tensor.
  using Targets = std::vector<UploadTarget>;

  void Notify();
  bool IsPacked(const wire::ChunkHeader& chunk) const {
    return packed_.has_value() && chunk.tensor == static_cast<int>(packed_->id());
  }
  absl::Status Cover(const wire::ChunkHeader& chunk, uint64_t payload_bytes, Targets* targets)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CoverInput(TensorId id, uint64_t offset, uint64_t bytes, Targets* targets)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CoverPacked(const wire::ChunkHeader& chunk, uint64_t payload_bytes, Targets* targets)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  enum class Source : uint8_t { kAnyMemory, kSmall, kPinned, kImported };
  absl::Status WriteFrom(Source source, Returns returns, const wire::ChunkHeader& chunk,
                         absl::Span<const wire::Fragment> payload, uint64_t payload_bytes);
  absl::Status Copy(Source source, Returns returns, const wire::ChunkHeader& chunk,
                    absl::Span<const wire::Fragment> payload, const Targets& targets);
  absl::StatusOr<std::vector<EventRef>> Upload(Source source,
                                               absl::Span<const wire::Fragment> payload,
                                               const UploadTarget& target, uint32_t* crc);
  absl::StatusOr<std::unique_ptr<worker::Upload>> BeginUpload(Source source, Targets targets);
  absl::StatusOr<std::vector<EventRef>> UploadPacked(Source source, const wire::ChunkHeader& chunk,
                                                     absl::Span<const wire::Fragment> payload,
                                                     const Targets& targets);
  void ForgetDoneUploads() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const OperationInfo info_;
  Device* const device_;
  const absl::Time reserved_time_;
  std::unique_ptr<Operation> operation_;
  std::optional<PackedInput> packed_;  // constant; empty if no input arrives packed
  MemoryBudget::Reservation reservation_;
  const DestroyedCallback on_destroyed_;

  mutable absl::Mutex mutex_;
  std::map<TensorId, Input> inputs_ ABSL_GUARDED_BY(mutex_);
  // Chunks that are being copied. Inputs are complete only when this is 0.
  int copying_ ABSL_GUARDED_BY(mutex_) = 0;
  // Bounded by the device's staging memory. Finished uploads are removed when new ones are added.
  mutable std::vector<EventRef> uploads_ ABSL_GUARDED_BY(mutex_);
  mutable CopyTimes upload_copies_ ABSL_GUARDED_BY(mutex_);
  bool uploaded_noticed_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  absl::Time uploaded_time_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();

  absl::Mutex listener_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  OperationListener* listener_ ABSL_GUARDED_BY(listener_mutex_) = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_SHARD_OPERATION_H_
