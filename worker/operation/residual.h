// Residual: the state that a forward operation leaves on this worker for a later backward: the
// buffers of its inputs, out and lse. It is independent of rings and generations.
#ifndef RINGATTN_WORKER_OPERATION_RESIDUAL_H_
#define RINGATTN_WORKER_OPERATION_RESIDUAL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/attention/tensors.h"
#include "common/program/program.h"
#include "worker/device/device.h"
#include "worker/executor/operation.h"
#include "worker/operation/memory_budget.h"

namespace ringattn::worker {

// Returns the tensors of a residual: what a backward with saved forward results reads, except the
// incoming gradients.
std::vector<TensorId> ResidualTensors(const AttentionSpec& spec);

// Immutable. Shared by the store and by every operation that reads it. The last owner frees the
// buffers and their reservation in the memory budget.
class Residual {
 public:
  using Buffers = std::map<TensorId, std::shared_ptr<DeviceBuffer>>;

  Residual(Buffers buffers, MemoryBudget::Reservation reservation)
      : reservation_(std::move(reservation)), buffers_(std::move(buffers)) {}

  int64_t bytes() const { return reservation_.bytes(); }

  // Returns the loans for a backward `program`: one for each buffer that holds this rank's shard of
  // a residual tensor. Each loan keeps `residual` alive. Returns INVALID_ARGUMENT if the program
  // reads a tensor that is neither in the residual nor sent with a backward that uses one.
  static absl::StatusOr<std::vector<LentBuffer>> LendTo(
      const Program& program, const std::shared_ptr<const Residual>& residual);

 private:
  const MemoryBudget::Reservation reservation_;  // released after the buffers
  const Buffers buffers_;
};

// Returns the bytes of the buffers that the operation would leave as a residual. REQUIRES:
// `operation` is allocated, and it is a forward whose program keeps its inputs.
int64_t ResidualBytes(Operation& operation);
// Makes a residual that shares those buffers and takes their bytes from `reservation`, the
// operation's own. REQUIRES: as for ResidualBytes, and the operation has finished.
std::shared_ptr<const Residual> MakeResidual(Operation& operation,
                                             MemoryBudget::Reservation& reservation);

// The worker's residuals by the id of the operation that left them. Thread safe.
class ResidualStore {
 public:
  void Put(const std::string& id, std::shared_ptr<const Residual> residual);
  // Returns null if there is no such residual.
  std::shared_ptr<const Residual> Find(const std::string& id) const;
  void Drop(const std::string& id);
  void Clear();

  int64_t count() const;
  int64_t bytes() const;

 private:
  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<const Residual>> residuals_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_RESIDUAL_H_
