// FallbackRingTransport: chooses between two transports for each ring. A ring uses the primary
// transport if all members can, else the fallback. All members decide from the same blobs and
// therefore agree.
#ifndef RINGATTN_WORKER_COMM_FALLBACK_FALLBACK_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_FALLBACK_FALLBACK_RING_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Thread safe.
class FallbackRingTransport : public RingTransport {
 public:
  struct Hooks {
    // Returns OK if the primary transport can form a ring from these blobs. A blob is empty if the
    // rank's primary transport could not prepare or was disabled. Must be a pure function.
    std::function<absl::Status(const std::vector<std::string>& blobs)> primary_suits;
    // Called with the choice, and the reason for the fallback. For the log.
    std::function<void(bool primary, const absl::Status& why)> on_choice;
  };

  // `primary` may be null: this rank's rings then use the fallback.
  FallbackRingTransport(std::unique_ptr<RingTransport> primary,
                        std::unique_ptr<RingTransport> fallback, Hooks hooks);

  // Fails if neither transport can prepare.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  // If the primary's Connect fails with FAILED_PRECONDITION kGiveUpAfter times in a row, this rank
  // disables the primary.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override;

  static constexpr int kGiveUpAfter = 3;

 private:
  const std::unique_ptr<RingTransport> primary_;
  const std::unique_ptr<RingTransport> fallback_;
  const Hooks hooks_;

  absl::Mutex mutex_;
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;  // of the primary, in a row
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_FALLBACK_FALLBACK_RING_TRANSPORT_H_
