// OperationRegistry: the operations that are reserved on this worker.
#ifndef RINGATTN_WORKER_OPERATION_OPERATION_REGISTRY_H_
#define RINGATTN_WORKER_OPERATION_OPERATION_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/device/device.h"
#include "worker/operation/memory_budget.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// Thread safe.
class OperationRegistry {
 public:
  // Called, from any thread, when a released operation's memory is free.
  using ReleasedCallback = std::function<void(const OperationInfo&)>;

  // `device` and `budget` outlive the registry and everything it made.
  OperationRegistry(Device* device, MemoryBudget* budget, ReleasedCallback on_released);

  // Sets memory aside for the operation, which is bound and not allocated.
  //   INVALID_ARGUMENT    the id is taken, or calls that the device cannot make ready
  //   RESOURCE_EXHAUSTED  over the memory limit, with the arithmetic
  absl::StatusOr<std::shared_ptr<ShardOperation>> Admit(const OperationInfo& info,
                                                        std::unique_ptr<Operation> operation);

  // Null if there is none of that id and generation.
  std::shared_ptr<ShardOperation> Find(const std::string& id, uint64_t generation) const;

  // Ends the operation and lets go of it; on_released follows once nobody uses its
  // memory any more, at once if there is no such operation.
  void Release(const std::string& id, uint64_t generation);

  // Ends every operation with ABORTED and lets go of all of them.
  void EndAll(const std::string& reason);

  // True once the memory of everything ever reserved is free.
  bool WaitUntilEmpty(absl::Time deadline) const;

 private:
  void OnDestroyed(const OperationInfo& info);

  Device* const device_;
  MemoryBudget* const budget_;
  const ReleasedCallback on_released_;

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<ShardOperation>> operations_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, uint64_t> releasing_ ABSL_GUARDED_BY(mutex_);  // id -> generation
  int alive_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_OPERATION_REGISTRY_H_
