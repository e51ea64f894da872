// OperationRegistry: the operations that this worker has reserved.
#ifndef RINGATTN_WORKER_OPERATION_OPERATION_REGISTRY_H_
#define RINGATTN_WORKER_OPERATION_OPERATION_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/device/device.h"
#include "worker/operation/kept_operations.h"
#include "worker/operation/memory_budget.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// Thread safe.
class OperationRegistry {
 public:
  // Called once the memory of a released operation is free, on any thread.
  using ReleasedCallback = std::function<void(const OperationInfo&)>;

  // `device`, `budget` and `kept` must outlive the registry and every operation that it admits.
  // `kept` receives operations that have ended well; null: none are kept.
  OperationRegistry(Device* device, MemoryBudget* budget, ReleasedCallback on_released,
                    KeptOperations* kept = nullptr);

  // Reserves memory for an operation and allocates its buffers. `operation` must be bound but not
  // allocated. Errors:
  //   INVALID_ARGUMENT    the id exists, or the device cannot prepare one of the calls
  //   RESOURCE_EXHAUSTED  exceeds the memory limit; the message has the figures
  absl::StatusOr<std::shared_ptr<ShardOperation>> Admit(const OperationInfo& info,
                                                        std::unique_ptr<Operation> operation);
  // Admits an operation that is allocated already. Returns INVALID_ARGUMENT if the id exists.
  absl::StatusOr<std::shared_ptr<ShardOperation>> Admit(const OperationInfo& info,
                                                        PreparedOperation prepared);

  // Reserves memory as Admit() does, for an operation that is not admitted. Same errors.
  absl::StatusOr<PreparedOperation> Allocate(std::unique_ptr<Operation> operation);

  // Returns the memory of an admitted operation of this recipe; nullopt if there is none.
  std::optional<int64_t> BytesOf(absl::string_view recipe) const;

  // Returns null if there is no operation with this id and generation.
  std::shared_ptr<ShardOperation> Find(const std::string& id, uint64_t generation) const;

  // Ends the operation and drops the registry's reference. Calls on_released when the last user of
  // its memory is done, or at once if there is no such operation.
  void Release(const std::string& id, uint64_t generation);

  // Ends every operation with ABORTED and drops all references.
  void EndAll(const std::string& reason);

  // Waits until the memory of every admitted operation is free. Returns false at `deadline`.
  bool WaitUntilEmpty(absl::Time deadline) const;
  // The same for operations of several members, which exchange with peers.
  bool WaitUntilNoPeers(absl::Time deadline) const;

 private:
  void OnDestroyed(const OperationInfo& info, PreparedOperation prepared, bool ended_well);

  Device* const device_;
  MemoryBudget* const budget_;
  const ReleasedCallback on_released_;
  KeptOperations* const kept_;

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<ShardOperation>> operations_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, uint64_t> releasing_ ABSL_GUARDED_BY(mutex_);  // id -> generation
  int alive_ ABSL_GUARDED_BY(mutex_) = 0;
  int with_peers_ ABSL_GUARDED_BY(mutex_) = 0;  // of the alive ones
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_OPERATION_REGISTRY_H_
