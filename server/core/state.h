// What the coordinator's core remembers: plain records, changed only by
// Coordinator::Impl. Not thread safe.
#ifndef RINGATTN_SERVER_CORE_STATE_H_
#define RINGATTN_SERVER_CORE_STATE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events.h"

namespace ringattn::server {

// A connected worker.
struct WorkerRecord {
  v1::Register registration;
  absl::Time last_heard;
  v1::Heartbeat heartbeat;  // the newest
  v1::Committed committed;  // what it measured of its newest ring
};

enum class RingPhase {
  kEmpty,      // no worker is connected
  kGathering,  // waits until RingRecord::deadline for more workers
  kPreparing,
  kCommitting,
  kReady,
  kTearingDown,
};

// Somebody reported that the ring broke. Until the window closes, evidence is
// gathered of who broke it: the reporter is often only the neighbour.
struct Suspicion {
  absl::Time opened;
  absl::Time closes;
  std::string reason;  // the first report's
  std::set<ConnectionId> reporters;
  std::set<std::string> operations;                  // that the reports name
  std::map<ConnectionId, v1::Heartbeat> heartbeats;  // as the window opened
};

struct RingRecord {
  RingPhase phase = RingPhase::kEmpty;
  uint64_t generation = 0;
  std::vector<ConnectionId> members;             // by rank; the lost ones too
  std::vector<std::string> blobs;                // by rank
  std::set<ConnectionId> awaited;                // that have not answered in this phase
  absl::Time deadline = absl::InfiniteFuture();  // of this phase
  int failed_formings = 0;                       // since the last ready ring
  std::optional<Suspicion> suspicion;            // kReady only
};

// The worker's side of one attempt to serve a request. It outlives the request
// until every member has given its memory back.
struct OperationRecord {
  enum class Phase {
    kReserving,
    kUploading,
    kUploaded,  // waits for its turn to run
    kRunning,   // until every member has finished
    kDownloading,
    kReleasing,
  };
  struct Member {
    ConnectionId connection = 0;
    int64_t bytes = 0;            // predicted, then as reserved
    int64_t workspace_bytes = 0;  // of it, once reserved
    bool reserved = false;
    bool uploaded = false;
    bool finished = false;
    bool released = false;
    // Of the newest heartbeat that names this operation.
    uint32_t step = 0;
    uint64_t progress = 0;
    bool waits_for_peer = false;
    double fraction_done = 0;
    // Since when its transfer of this phase stands still, although it is waited for.
    std::optional<absl::Time> stands_since;
    v1::RankReport report;
  };

  std::string id;
  std::optional<StreamId> stream;  // none: the request has ended
  Phase phase = Phase::kReserving;
  std::vector<Member> members;  // by ring rank
  bool was_accepted = false;    // every member said yes to Reserve
  bool was_refused = false;     // one said no
  uint64_t run_sequence = 0;    // place in the one order of runs; 0 = none yet
  absl::Duration progress_timeout;
  absl::Time phase_since;
  // Upload: the client's last bytes. Run: the last sign of progress on any member.
  absl::Time last_advance;
  // A member's failure that a lost worker may explain; fails the request at `due`
  // unless the generation has ended by then.
  std::optional<Failure> pending_failure;
  absl::Time pending_failure_due = absl::InfiniteFuture();
};

// The client's side, from arrival until FinishRequest or FailRequest.
struct RequestRecord {
  RequestArrived arrived;
  absl::Time arrived_at;
  int64_t bytes = 0;  // of all tensors, in and out
  v1::OperationState state = v1::OPERATION_STATE_UNSPECIFIED;
  std::optional<Plan> plan;
  uint64_t plan_generation = 0;
  std::string operation_id;  // empty while queued
  // A worker had no memory: not worth another try before this many releases.
  uint64_t blocked_until_release = 0;
  // What workers that refused said their kernels need for this plan beside the buffers.
  std::map<ConnectionId, int64_t> workspace_bytes;

  int64_t WorkspaceOn(ConnectionId connection) const {
    const auto known = workspace_bytes.find(connection);
    return known == workspace_bytes.end() ? 0 : known->second;
  }
  absl::Time accepted_at;
  absl::Time run_at;
  absl::Time download_at;
  std::vector<std::string> member_names;  // by ring rank, once accepted
  uint64_t generation = 0;                // likewise
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_STATE_H_
