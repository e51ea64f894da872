// MemoryBudget: the device memory that a worker may reserve for requests, and how much of it is
// reserved.
#ifndef RINGATTN_WORKER_OPERATION_MEMORY_BUDGET_H_
#define RINGATTN_WORKER_OPERATION_MEMORY_BUDGET_H_

#include <cassert>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace ringattn::worker {

// Thread safe. Must outlive its reservations.
class MemoryBudget {
 public:
  // Returns its bytes to the budget on destruction. Movable.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
    Reservation& operator=(Reservation&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Reservation() {
      if (budget_ != nullptr) budget_->Return(bytes_);
    }
    int64_t bytes() const { return bytes_; }
    // Splits off `bytes` as a reservation with its own lifetime. REQUIRES: bytes <= bytes().
    Reservation Split(int64_t bytes) {
      assert(bytes <= bytes_);
      bytes_ -= bytes;
      return Reservation(budget_, bytes);
    }

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  // Frees reserved memory that is not in use, at least `bytes` if there is so much. Returns false
  // if there is none. Thread safe.
  using Reclaim = std::function<bool(int64_t bytes)>;

  explicit MemoryBudget(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Call before the first Take().
  void SetReclaim(Reclaim reclaim) { reclaim_ = std::move(reclaim); }

  // Reserves `bytes`, and reclaims memory for it if necessary. Returns RESOURCE_EXHAUSTED, with the
  // figures, if less than that is free.
  absl::StatusOr<Reservation> Take(int64_t bytes) {
    while (true) {
      int64_t taken_bytes = 0;
      {
        absl::MutexLock lock(&mutex_);
        if (bytes <= limit_bytes_ - taken_bytes_) {
          taken_bytes_ += bytes;
          return Reservation(this, bytes);
        }
        taken_bytes = taken_bytes_;
      }
      const int64_t free_bytes = limit_bytes_ - taken_bytes;
      if (reclaim_ && bytes <= limit_bytes_ && reclaim_(bytes - free_bytes)) continue;
      return absl::ResourceExhaustedError(
          absl::StrCat("needs ", bytes, " bytes, ", free_bytes, " are free (limit ", limit_bytes_,
                       ", ", taken_bytes, " reserved by other operations)"));
    }
  }

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t taken_bytes() const {
    absl::MutexLock lock(&mutex_);
    return taken_bytes_;
  }

 private:
  void Return(int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    taken_bytes_ -= bytes;
  }

  const int64_t limit_bytes_;
  Reclaim reclaim_;
  mutable absl::Mutex mutex_;
  int64_t taken_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_MEMORY_BUDGET_H_
