// WireEngine: moves the bytes of transfer groups over the connections between one rank and its
// peers.
//
// Flow control: a receive, once posted, grants its sender all of its bytes, because its memory is
// their target. Without a grant, a rank sends only transfers of at most kEagerBytes, and at most
// kEagerCredit bytes of them per peer. The receiver keeps those in a buffer until it posts the
// receive. So a peer cannot force it to store more than kEagerCredit bytes.
//
// Threads: connection i of every peer belongs to loop i. The thread that calls Run drives loop 0,
// which also carries grants and small transfers, so these need no other thread. Each other loop has
// a separate thread. A connection that is free takes the next chunk.
//
// Failures: a broken connection, a malformed frame or a late transfer ends the link to that peer:
// its transfers fail, now and later. Links to other peers are unaffected. A transfer fails only
// after every loop has closed its connections to the peer, so its memory is no longer in use.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_ENGINE_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/wire/frame_reader.h"
#include "worker/comm/wire/wire_counters.h"
#include "worker/comm/wire/wire_forming.h"
#include "worker/comm/wire/wire_frame.h"
#include "worker/comm/wire/wire_stream.h"

namespace ringattn::worker {

// Thread safe, except that one thread at a time calls Run.
class WireEngine {
 public:
  // `streams` as WireForming returns them.
  WireEngine(int rank, WireStreams streams, std::shared_ptr<WireCounters> counters);
  // REQUIRES: no Run is in progress.
  ~WireEngine();

  // Carries out the group, all transfers at once, and returns when each of them has ended. Returns
  // the error of the first one that failed: UNAVAILABLE, naming the peer and the cause. A transfer
  // that lasts longer than `timeout` ends the link to its peer. Adds to *progress for every
  // completed transfer and every 16 MiB.
  absl::Status Run(const std::vector<PeerTransfer>& group, absl::Duration timeout,
                   std::atomic<int64_t>* progress);

  // Ends the links to all peers, and with them a Run in progress. Never blocks.
  void Abort(const std::string& reason);

  static constexpr int64_t kEagerBytes = 8 << 10;
  static constexpr int64_t kEagerCredit = 64 << 10;

 private:
  struct Link;
  class Stripe;
  class Loop;

  // One transfer of the group that Run carries out.
  struct Transfer {
    const PeerTransfer* transfer = nullptr;
    Link* link = nullptr;
    uint64_t sequence = 0;
    int64_t assigned_bytes = 0;  // send: bytes given to connections
    int64_t moved_bytes = 0;     // sent or received
    std::vector<bool> arrived;   // receive: chunks that have arrived or are arriving
    bool done = false;
    absl::Status status;
  };
  // A chunk of a send that a connection carries.
  struct Chunk {
    Transfer* transfer = nullptr;  // null: none
    WireFrame frame;
    const char* data = nullptr;
  };

  // Posts the group and returns the links that have something to do.
  std::vector<Link*> Post(const std::vector<PeerTransfer>& group) ABSL_LOCKS_EXCLUDED(mutex_);
  void PostSend(Transfer* send) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PostReceive(Transfer* receive) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLateTransfers(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status StatusOfGroup() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Returns a chunk for a connection of the link to send, or none.
  Chunk TakeChunk(Link* link, int stripe) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnSent(const Chunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status OnGrant(Link* link, const WireFrame& frame) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<char*> OnData(Link* link, int stripe, const WireFrame& frame)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status OnDataEnd(Link* link, const WireFrame& frame) ABSL_LOCKS_EXCLUDED(mutex_);

  void Move(Transfer* transfer, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(Transfer* transfer, absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the link. The first cause counts.
  void Fail(Link* link, WireFailure failure, const std::string& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailWith(Link* link, const WireStream::Result& result) ABSL_LOCKS_EXCLUDED(mutex_);
  // A loop has closed one of the link's connections.
  void OnClosed(Link* link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeAll();
  // Wakes the loops that could help with the link's sends.
  void WakeHelpers(Link* link) ABSL_LOCKS_EXCLUDED(mutex_);

  const int rank_;
  const std::shared_ptr<WireCounters> counters_;
  std::atomic<bool> stopping_{false};

  absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  std::vector<Transfer> group_ ABSL_GUARDED_BY(mutex_);  // not resized while any is in progress
  size_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;        // of group_
  std::atomic<int64_t>* progress_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread::id runner_ ABSL_GUARDED_BY(mutex_);  // the thread in Run

  std::vector<std::unique_ptr<Link>> links_;  // by rank; null for this rank
  std::vector<std::unique_ptr<Loop>> loops_;
  std::vector<std::thread> threads_;  // of all loops but the first
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_ENGINE_H_
