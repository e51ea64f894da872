// StepRings: the step rings of writers on this machine (common/step_ring/step_ring.h). Every ring
// has a thread, which waits for requests and executes them in the engine's turn.
//
// Tests: step_rings_test.cc, step_streams_test.cc
#ifndef RINGATTN_WORKER_KV_STEP_RINGS_H_
#define RINGATTN_WORKER_KV_STEP_RINGS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/step_ring/step_ring.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "worker/region/region.h"

namespace ringattn::worker {

struct StepRingOptions {
  // A region that is attached now, or null. Empty: this worker accepts no rings.
  std::function<std::shared_ptr<Region>(const std::string& region_id)> find_region;
  // How long a thread waits actively for the next request before it sleeps.
  absl::Duration spin;
  // For metrics. Called on any thread; must not block.
  std::function<void(int64_t rings)> on_rings = [](int64_t) {};
  std::function<void(bool slept)> on_request = [](bool) {};  // a wait ended with a request
};

// The stream that a ring belongs to.
class StepRingOwner {
 public:
  virtual ~StepRingOwner() = default;
  // Executes `request` and writes its response. Returns false if the ring must end.
  virtual bool OnRingRequest(const v1::StepRequest& request, StepRingWriter* responses) = 0;
  // The client broke the rules of the ring, which has ended.
  virtual void OnRingError(const absl::Status& status) = 0;
};

// One ring. Stop may be called on any thread; everything else is StepRings' own.
class AttachedRing {
 public:
  // Ends the ring soon. Never blocks.
  void Stop();

 private:
  friend class StepRings;
  AttachedRing(std::shared_ptr<Region> region, uint8_t* ring, const StepRingLayout& layout);
  void Serve(const StepRingOptions& options, StepRingOwner* owner);

  const std::shared_ptr<Region> region_;  // keeps the memory mapped
  StepRingReader requests_;
  StepRingWriter responses_;
  std::atomic<bool> stop_{false};
};

// Thread safe.
class StepRings {
 public:
  // Each ring has a thread and keeps its region mapped.
  static constexpr int kMaxRings = 64;

  explicit StepRings(StepRingOptions options);
  // Stops all rings and waits for the requests that they execute.
  ~StepRings();
  StepRings(const StepRings&) = delete;
  StepRings& operator=(const StepRings&) = delete;

  // Sets the ring's response counter to zero and starts to serve it. The ring keeps its owner until
  // it has stopped. Errors: INVALID_ARGUMENT (BAD_CALL), naming the field; UNAVAILABLE if the
  // region is not attached now; RESOURCE_EXHAUSTED beyond kMaxRings; FAILED_PRECONDITION if this
  // worker accepts no rings.
  absl::StatusOr<std::shared_ptr<AttachedRing>> Attach(const v1::StepRing& ring,
                                                       std::shared_ptr<StepRingOwner> owner)
      ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Duration spin() const { return options_.spin; }

 private:
  struct Server {
    std::thread thread;
    std::weak_ptr<AttachedRing> ring;
    std::atomic<bool> done{false};
  };

  // Joins threads that have ended.
  void Reap() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StepRingOptions options_;
  std::atomic<int64_t> count_{0};
  absl::Mutex mutex_;
  std::list<Server> servers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_STEP_RINGS_H_
