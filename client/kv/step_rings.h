// StepRings: the step rings of one writer, one for each rank, in a separate region
// (common/step_ring/step_ring.h).
#ifndef RINGATTN_CLIENT_KV_STEP_RINGS_H_
#define RINGATTN_CLIENT_KV_STEP_RINGS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/kv/active_wait.h"
#include "client/memory/shared_region.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/step_ring/step_ring.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn::client {

// Not thread safe.
class StepRings {
 public:
  // Makes a region with a ring for each rank and attaches it to the workers. Blocks for some
  // milliseconds; 10 s if a worker hangs. FAILED_PRECONDITION if no worker of this machine attaches
  // it; RESOURCE_EXHAUSTED without memory.
  static absl::StatusOr<std::shared_ptr<StepRings>> Make(const KvCacheSpec& spec,
                                                         const KvPlacement& placement,
                                                         SharedRegion::AttachCall attach);
  // Closes the region.
  ~StepRings();
  StepRings(const StepRings&) = delete;
  StepRings& operator=(const StepRings&) = delete;

  // The region's present name at the coordinator; empty while it is attached nowhere.
  std::string region_id() const;

  // Empties the rank's ring and describes it for StepHello.
  v1::StepRing Start(size_t rank);
  // Set its spin after the worker's answer to StepHello.
  ActiveWait& active_wait() { return active_wait_; }

  // Returns whether these requests, none of whose responses exceeds `response_bytes`, fit the ring.
  bool Fits(const std::vector<const v1::StepRequest*>& requests, int64_t response_bytes) const;
  // Requires that they fit and that all earlier requests are answered. The worker can begin with
  // the first one while the others are written.
  void Send(size_t rank, const std::vector<const v1::StepRequest*>& requests);
  // Takes the next response, which is empty for a request without one. Returns false if there is
  // none. INTERNAL (BAD_ANSWER) if the worker breaks the rules of the ring.
  absl::StatusOr<bool> Take(size_t rank, v1::StepResponse* response);
  // Waits for the next response of one of `ranks`: actively, and then asleep for the first rank's,
  // at most for `sleep`. Returns false if there is none. Requires that ranks is not empty.
  bool Wait(const std::vector<size_t>& ranks, absl::Duration sleep);

 private:
  struct Ring {
    StepRingWriter requests;
    StepRingReader responses;
  };

  StepRings(std::shared_ptr<SharedRegion> region, const StepRingLayout& layout, int world_size);

  const std::shared_ptr<SharedRegion> region_;
  const StepRingLayout layout_;
  std::vector<Ring> rings_;  // by rank
  ActiveWait active_wait_;
  std::string frame_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_STEP_RINGS_H_
