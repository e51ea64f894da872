// ShardOperation: one operation as this worker holds it: its buffers, how much of
// its inputs has arrived, and where it stands.
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
#include "worker/operation/memory_budget.h"
#include "worker/operation/packed_input.h"
#include "worker/operation/residual.h"

namespace ringattn::worker {

// Told when the operation has something new to say. Called without locks of the
// operation other than the one that keeps the listener from being removed.
class OperationListener {
 public:
  virtual ~OperationListener() = default;
  virtual void OnOperationChanged() = 0;
};

struct OperationInfo {
  std::string id;
  uint64_t generation = 0;
  bool with_timeline = false;
  // For logs.
  std::string request_id = {};
  std::string traceparent = {};  // empty: none
};

// Thread safe. Shared by the registry, the runner, the open exchange and every slice
// that gRPC still sends from its buffers; the memory goes back with the last of them.
class ShardOperation {
 public:
  // An output of the program, or a part of it.
  struct Output {
    TensorId id;
    DeviceRange memory;
    int64_t offset = 0;  // of the memory in the rank's tensor
  };
  // When copies to the device began and ended, and what they took in all.
  struct CopyTimes {
    absl::Time begin = absl::InfiniteFuture();
    absl::Time end = absl::InfinitePast();
    absl::Duration total;
  };

  // `on_destroyed` runs after the memory went back.
  ShardOperation(OperationInfo info, std::unique_ptr<Operation> operation,
                 MemoryBudget::Reservation reservation, Device* device,
                 std::function<void()> on_destroyed);
  ~ShardOperation();

  ShardOperation(const ShardOperation&) = delete;
  ShardOperation& operator=(const ShardOperation&) = delete;

  const OperationInfo& info() const { return info_; }
  Operation& operation() { return *operation_; }
  int64_t reserved_bytes() const { return reservation_.bytes(); }

  // --- inputs
  // Takes one chunk on its way to its input buffer; the payload is free on return.
  // Of a packed tensor it may be of the whole or of one of its parts (PackedInput).
  // INVALID_ARGUMENT if it is no input, lies outside, overlaps or fails its crc;
  // RESOURCE_EXHAUSTED if its tensor came in too many pieces (kMaxRangesPerTensor).
  absl::Status Write(const wire::ChunkHeader& chunk, absl::Span<const wire::Fragment> payload,
                     uint64_t payload_bytes);
  // The same of memory that the device reaches by itself, each fragment within one pin, and never
  // of a packed tensor as a whole
  // (Device::PinHost). Returns when it is not read any more.
  absl::Status WritePinned(const wire::ChunkHeader& chunk, absl::Span<const wire::Fragment> payload,
                           uint64_t payload_bytes);
  // The same of a client's CUDA memory (Device::ImportMemory). REQUIRES: the chunk has no crc.
  absl::Status WriteImported(const wire::ChunkHeader& chunk,
                             absl::Span<const wire::Fragment> payload, uint64_t payload_bytes);
  bool InputsComplete() const;
  // True for the first caller after the inputs are complete.
  bool TakeUploadedNotice();
  absl::Time reserved_time() const { return reserved_time_; }
  // From Reserve to the last input byte; zero while incomplete.
  absl::Time uploaded_time() const;
  // What the program has to wait for before it touches inputs. REQUIRES: complete.
  std::vector<EventRef> PendingUploads() const;
  // Zero on devices whose memory is the host's. Complete once the program has ended.
  CopyTimes upload_copies() const;

  // --- outputs
  std::vector<Output> Outputs() const;
  // Their parts in the order in which they are streamed (shard.proto).
  std::vector<Output> StreamedOutputs() const;
  // Outputs, or ranges of them, on their way to the host (Device::BeginDownload). REQUIRES:
  // finished.
  std::unique_ptr<Download> BeginDownload(const std::vector<Output>& outputs,
                                          std::function<void()> on_ready) const;
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) const;

  // A part of an output into pinned memory (Device::CopyToPinned). REQUIRES: finished.
  absl::StatusOr<EventRef> CopyToPinned(void* pinned, DeviceRange part) const;

  // Parts of outputs into a client's CUDA memory (Device::CopyImported). REQUIRES: finished.
  absl::StatusOr<EventRef> CopyToImported(absl::Span<const DeviceCopy> pieces) const;
  // A few bytes into memory that the device reaches.
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) const;

  // What it leaves for a backward, with its part of the memory; once, from the control thread.
  // Null unless it has finished well. REQUIRES: its program keeps its inputs.
  std::shared_ptr<const Residual> TakeResidual();

  // --- life
  // The program has ended well: outputs can be read.
  void SetFinished();
  // The operation is over for the service (released, failed, generation ended): the
  // exchange ends with `why`, the program stops. The first call counts.
  void End(absl::Status why);
  bool finished() const;
  // OK while it has not ended.
  absl::Status ended() const;

  // One listener at a time; false if there is one already.
  bool SetListener(OperationListener* listener);
  void RemoveListener();

 private:
  struct Input {
    DeviceBuffer* buffer = nullptr;
    ByteRangeSet arrived{0};
  };

  // Where a chunk's bytes go: to one input or, if it is of a packed tensor, to each of its parts.
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
  enum class Source : uint8_t { kAnyMemory, kPinned, kImported };
  absl::Status WriteFrom(Source source, const wire::ChunkHeader& chunk,
                         absl::Span<const wire::Fragment> payload, uint64_t payload_bytes);
  absl::Status Copy(Source source, const wire::ChunkHeader& chunk,
                    absl::Span<const wire::Fragment> payload, const Targets& targets);
  absl::StatusOr<std::vector<EventRef>> Upload(Source source,
                                               absl::Span<const wire::Fragment> payload,
                                               const UploadTarget& target, uint32_t* crc);
  absl::StatusOr<std::vector<EventRef>> UploadPacked(const wire::ChunkHeader& chunk,
                                                     absl::Span<const wire::Fragment> payload,
                                                     const Targets& targets);
  void ForgetDoneUploads() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const OperationInfo info_;
  Device* const device_;
  const absl::Time reserved_time_;
  std::unique_ptr<Operation> operation_;
  std::optional<PackedInput> packed_;  // fixed; nothing where no packed input is cut as one
  MemoryBudget::Reservation reservation_;
  const std::function<void()> on_destroyed_;

  mutable absl::Mutex mutex_;
  std::map<TensorId, Input> inputs_ ABSL_GUARDED_BY(mutex_);
  // Chunks whose bytes are being copied; completeness waits for them.
  int copying_ ABSL_GUARDED_BY(mutex_) = 0;
  // Bounded by the device's staging memory: what is done goes when more comes.
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
