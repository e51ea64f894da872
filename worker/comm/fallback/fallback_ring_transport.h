// FallbackRingTransport: two ways to form a ring; each ring takes the primary transport where
// all of its members can, and the fallback otherwise. All members come to the same decision,
// from the same blobs.
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
    // OK if a ring of these blobs of the primary transport can be formed. An empty blob is
    // of a rank whose primary transport could not prepare or was given up. A pure function.
    std::function<absl::Status(const std::vector<std::string>& blobs)> primary_suits;
    // Which one a ring takes: the primary, or the fallback and why. For the log.
    std::function<void(bool primary, const absl::Status& why)> on_choice;
  };

  // `primary` may be null: this rank cannot, and its rings take the fallback.
  FallbackRingTransport(std::unique_ptr<RingTransport> primary,
                        std::unique_ptr<RingTransport> fallback, Hooks hooks);

  // Fails if neither can prepare.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  // A primary transport whose Connect answers FAILED_PRECONDITION kGiveUpAfter times without
  // a success between is not offered any more: what should work there does not.
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
