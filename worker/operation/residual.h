// Residual: what a forward operation leaves on this worker for a backward one later: the buffers
// of its inputs, out and lse as they lie, in no ring and no generation.
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

// The tensors of a residual: what a backward that is given the forward's results reads, but for
// the gradients that it starts from.
std::vector<TensorId> ResidualTensors(const AttentionSpec& spec);

// Immutable, shared by the store and by every operation that reads it: buffers and their part of
// the memory budget go back with the last of them.
class Residual {
 public:
  using Buffers = std::map<TensorId, std::shared_ptr<DeviceBuffer>>;

  Residual(Buffers buffers, MemoryBudget::Reservation reservation)
      : reservation_(std::move(reservation)), buffers_(std::move(buffers)) {}

  int64_t bytes() const { return reservation_.bytes(); }

  // For the buffers of a backward program that hold this rank's shards of the residual's
  // tensors; each keeps all of `residual` alive. INVALID_ARGUMENT if the program reads a tensor
  // that neither the residual has nor a client of one sends.
  static absl::StatusOr<std::vector<LentBuffer>> LendTo(
      const Program& program, const std::shared_ptr<const Residual>& residual);

 private:
  const MemoryBudget::Reservation reservation_;  // goes back after the buffers
  const Buffers buffers_;
};

// What an operation would leave: bytes of its buffers. REQUIRES: allocated, a forward one whose
// program keeps its inputs.
int64_t ResidualBytes(Operation& operation);
// Shares those buffers. `reservation` is what they were taken from. REQUIRES: the same, and it
// has finished.
std::shared_ptr<const Residual> MakeResidual(Operation& operation,
                                             MemoryBudget::Reservation& reservation);

// Residuals by the id of the operation that left them. Thread safe.
class ResidualStore {
 public:
  void Put(const std::string& id, std::shared_ptr<const Residual> residual);
  // Null if there is none.
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
