// CoordinatorSnapshot: an overview for operators, copied so that other threads may read it.
#ifndef RINGATTN_SERVER_CORE_EVENTS_SNAPSHOT_H_
#define RINGATTN_SERVER_CORE_EVENTS_SNAPSHOT_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/events.h"
#include "server/core/events/kv_events.h"

namespace ringattn::server {

// RequestState, subdivided by what the request waits for.
enum class RequestStage : uint8_t {
  kPlanning,   // queued; its plan is being made
  kQueued,     // waits for memory, a slot or a ring
  kReserving,  // the workers reserve memory
  kUploading,
  kReady,  // all inputs are uploaded; waits to run
  kComputing,
  kDownloading,
};
inline constexpr size_t kRequestStages = 7;
// "planning", "queued", ...
const char* RequestStageName(RequestStage stage);

struct RequestSnapshot {
  StreamId stream = 0;
  std::string request_id;
  std::string principal;    // empty: anonymous
  std::string traceparent;  // empty: none
  Direction direction = Direction::kForward;
  RequestStage stage = RequestStage::kQueued;
  absl::Time arrived_at;
  absl::Time deadline;
  int64_t query_tokens = 0;  // summed over batch rows
  int64_t input_bytes = 0;
  std::vector<std::string> members;  // by ring rank, once accepted
  double computed_fraction = 0;      // of the least advanced member, while computing
};

struct WorkerSnapshot {
  v1::WorkerInfo info;
  absl::Duration silence;  // time since its last message
  std::string computes;    // id of the operation that its heartbeat reports; empty: none
  double computed_fraction = 0;
  bool waits_for_peer = false;
};

struct CoordinatorSnapshot {
  absl::Time when;
  v1::RingState ring_state = v1::RING_STATE_UNSPECIFIED;
  uint64_t generation = 0;
  int64_t ring_reforms = 0;
  int64_t queued_requests = 0;
  int64_t queued_bytes = 0;
  int64_t reserved_bytes = 0;  // summed over workers
  KvCacheCounts kv_caches;
  std::vector<WorkerSnapshot> workers;  // members by rank, then the others
  std::array<int64_t, kRequestStages> requests_by_stage{};
  std::vector<RequestSnapshot> requests;  // those that hold memory first
  std::vector<LostWorker> losses;         // newest first
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_SNAPSHOT_H_
