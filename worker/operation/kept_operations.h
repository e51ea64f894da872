// KeptOperations: operations of this worker that have ended well or were only prepared, ready to
// run for an equal request. A model's layers and training steps, and a server's small calls, repeat
// requests: the next one then needs neither a program, nor memory, nor prepared kernel calls.
//
// A kept operation stays counted in MemoryBudget, which evicts it as soon as anything else needs
// the memory. Its buffers still hold data of its request, so its recipe must contain the principal.
//
// Tests: kept_operations_test.cc, equal_requests_test.cc
#ifndef RINGATTN_WORKER_OPERATION_KEPT_OPERATIONS_H_
#define RINGATTN_WORKER_OPERATION_KEPT_OPERATIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/kept_parts.h"
#include "worker/executor/operation.h"
#include "worker/operation/memory_budget.h"

namespace ringattn::worker {

// An allocated operation and its memory in the budget. The operation is destroyed first.
struct PreparedOperation {
  MemoryBudget::Reservation reservation;
  std::unique_ptr<Operation> operation;
};

// Thread safe. Destroys operations on the calling thread.
class KeptOperations {
 public:
  using Bounds = KeptParts<PreparedOperation>::Bounds;
  struct Stats {
    int64_t count = 0;
    int64_t bytes = 0;
    int64_t holds = 0;  // recipes that clients have prepared
    KeptParts<PreparedOperation>::Counts counts;
  };

  explicit KeptOperations(const Bounds& bounds) : parts_(bounds) {}

  // Returns an operation of this recipe, ready to run; nullopt if none is kept.
  std::optional<PreparedOperation> Take(absl::string_view recipe);
  // Keeps an operation, as far as the bounds allow. REQUIRES: it has run successfully or not at
  // all, and nothing uses its memory or its calls any more.
  void Keep(std::string recipe, PreparedOperation prepared);
  // Keeps operations of this recipe for `ttl` from now at least: those that are kept already, and
  // those that Keep() receives meanwhile.
  void Hold(absl::string_view recipe, absl::Duration ttl);
  // Returns the bytes of the newest operation of this recipe; nullopt if none is kept.
  std::optional<int64_t> BytesOf(absl::string_view recipe) const;
  // Returns FAILED_PRECONDITION, with the limit, if the bounds allow no operation of this size.
  absl::Status CheckMayKeep(int64_t bytes) const;
  // Frees at least `bytes`, or everything. Returns false if nothing was kept.
  bool Evict(int64_t bytes);
  // Drops operations whose lease has ended.
  void DropExpired();
  // Drops all, because the ring has ended.
  void Clear();

  Stats stats() const;

 private:
  mutable absl::Mutex mutex_;
  KeptParts<PreparedOperation> parts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_KEPT_OPERATIONS_H_
