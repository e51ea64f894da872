#include "worker/operation/kept_operations.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {

std::optional<PreparedOperation> KeptOperations::Take(absl::string_view recipe) {
  std::optional<PreparedOperation> taken;
  {
    absl::MutexLock lock(&mutex_);
    taken = parts_.Take(recipe, MonotonicNow());
  }
  if (taken.has_value()) taken->operation->control().Reset();
  return taken;
}

// Dropped operations are destroyed without the lock: freeing device memory takes time.
void KeptOperations::Keep(std::string recipe, PreparedOperation prepared) {
  const int64_t bytes = prepared.reservation.bytes();
  std::vector<PreparedOperation> dropped;
  absl::MutexLock lock(&mutex_);
  dropped = parts_.Keep(std::move(recipe), bytes, std::move(prepared), MonotonicNow());
}

void KeptOperations::Hold(absl::string_view recipe, absl::Duration ttl) {
  absl::MutexLock lock(&mutex_);
  (void)parts_.Hold(recipe, MonotonicNow() + ttl);
}

std::optional<int64_t> KeptOperations::BytesOf(absl::string_view recipe) const {
  absl::MutexLock lock(&mutex_);
  return parts_.BytesOf(recipe);
}

absl::Status KeptOperations::CheckMayKeep(int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  if (parts_.bounds().max_count == 0) {
    return absl::FailedPreconditionError("the worker keeps no operations (--prepared_lease=0)");
  }
  const int64_t most = parts_.bounds().max_bytes;
  if (bytes <= most) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("it takes ", bytes,
                                                    " bytes; the worker keeps at most ", most,
                                                    ", a part of its --memory_limit"));
}

bool KeptOperations::Evict(int64_t bytes) {
  std::vector<PreparedOperation> dropped;
  {
    absl::MutexLock lock(&mutex_);
    dropped = parts_.Evict(bytes);
  }
  return !dropped.empty();
}

void KeptOperations::DropExpired() {
  std::vector<PreparedOperation> dropped;
  absl::MutexLock lock(&mutex_);
  dropped = parts_.Expire(MonotonicNow());
}

void KeptOperations::Clear() {
  std::vector<PreparedOperation> dropped;
  absl::MutexLock lock(&mutex_);
  dropped = parts_.Clear();
}

KeptOperations::Stats KeptOperations::stats() const {
  absl::MutexLock lock(&mutex_);
  return {static_cast<int64_t>(parts_.count()), parts_.bytes(),
          static_cast<int64_t>(parts_.holds()), parts_.counts()};
}

}  // namespace ringattn::worker
