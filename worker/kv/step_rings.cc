#include "worker/kv/step_rings.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/kv/kv_error.h"

namespace ringattn::worker {
namespace {

// A stop is noticed after this time at the latest, should its wake-up be lost.
constexpr absl::Duration kRingSleep = absl::Milliseconds(100);

absl::Status RingError(absl::string_view message) {
  return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL", message);
}

// Whether a serialized StepRequest begins with a LayerCall.
bool IsLayerCall(const std::string& frame) {
  constexpr char kTag = v1::StepRequest::kCallFieldNumber << 3 | 2;  // 2: with a length
  return !frame.empty() && frame.front() == kTag;
}

// ParseFromString would free an earlier LayerCall.
bool ParseReusing(const std::string& frame, v1::StepRequest* request) {
  if (!request->has_call()) return request->ParseFromString(frame);
  v1::LayerCall* const call = request->release_call();
  call->Clear();
  request->Clear();
  request->set_allocated_call(call);
  return request->MergeFromString(frame);
}

}  // namespace

AttachedRing::AttachedRing(std::shared_ptr<Region> region, uint8_t* ring,
                           const StepRingLayout& layout)
    : region_(std::move(region)),
      requests_(StepRingQueue::Requests(ring, layout)),
      responses_(StepRingQueue::Responses(ring, layout)) {
  responses_.Reset();
}

void AttachedRing::Stop() {
  stop_.store(true);
  requests_.Interrupt();
}

void AttachedRing::Serve(const StepRingOptions& options, StepRingOwner* owner) {
  std::string frame;
  // A LayerCall keeps the memory of its tensors for the next one.
  v1::StepRequest call, other;
  while (!stop_.load()) {
    const absl::StatusOr<bool> taken = requests_.Take(&frame);
    if (!taken.ok()) return owner->OnRingError(RingError(taken.status().message()));
    if (!*taken) {
      const SharedWord::Wake wake = requests_.Wait(options.spin, kRingSleep, &stop_);
      if (wake != SharedWord::Wake::kTimeout) options.on_request(wake == SharedWord::Wake::kAsleep);
      continue;
    }
    v1::StepRequest* const request = IsLayerCall(frame) ? &call : &other;
    if (!ParseReusing(frame, request)) {
      return owner->OnRingError(RingError("a message in the ring is not a StepRequest"));
    }
    if (!owner->OnRingRequest(*request, &responses_)) return;
  }
}

StepRings::StepRings(StepRingOptions options) : options_(std::move(options)) {}

StepRings::~StepRings() {
  std::list<Server> servers;
  {
    absl::MutexLock lock(&mutex_);
    servers.swap(servers_);
  }
  for (Server& server : servers) {
    if (const std::shared_ptr<AttachedRing> ring = server.ring.lock()) ring->Stop();
  }
  for (Server& server : servers) server.thread.join();
}

void StepRings::Reap() {
  for (auto it = servers_.begin(); it != servers_.end();) {
    if (!it->done.load()) {
      ++it;
      continue;
    }
    it->thread.join();
    it = servers_.erase(it);
  }
}

absl::StatusOr<std::shared_ptr<AttachedRing>> StepRings::Attach(
    const v1::StepRing& ring, std::shared_ptr<StepRingOwner> owner) {
  if (options_.find_region == nullptr) {
    return absl::FailedPreconditionError("this worker takes no host memory (--local_memory)");
  }
  std::shared_ptr<Region> region = options_.find_region(ring.region_id());
  if (region == nullptr) return absl::UnavailableError("the ring's region is not attached");
  if (region->on_device()) return RingError("ring.region_id names a region of CUDA memory");
  const absl::StatusOr<StepRingLayout> layout =
      CheckStepRing(ring.offset(), ring.slots(), ring.request_bytes(), ring.response_bytes(),
                    region->bytes(), MaxServedMessageBytes(Limits()));
  if (!layout.ok()) return RingError(layout.status().message());
  uint8_t* const memory = region->data() + ring.offset();

  absl::MutexLock lock(&mutex_);
  Reap();
  if (servers_.size() >= kMaxRings) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this worker serves ", kMaxRings, " rings, the maximum"));
  }
  std::shared_ptr<AttachedRing> attached(new AttachedRing(std::move(region), memory, *layout));
  Server& server = servers_.emplace_back();
  server.ring = attached;
  options_.on_rings(++count_);
  server.thread = std::thread([this, &server, ring = attached, owner = std::move(owner)]() mutable {
    ring->Serve(options_, owner.get());
    ring.reset();
    owner.reset();
    options_.on_rings(--count_);
    server.done.store(true);
  });
  pthread_setname_np(server.thread.native_handle(), "kv_ring");
  return attached;
}

}  // namespace ringattn::worker
