// WireEngine: moves the bytes of transfer groups over the connections between one rank and its
// peers.
//
//   WireGroup       the transfers of a lane's group in progress
//   WireLink        flow control with one peer
//   WireConnection  the frames of one connection
//   WireLoop        polls the connections of one thread
//
// Threads: connection i of every peer belongs to loop i. The thread that calls Run drives loop 0,
// which also carries grants and small transfers, so these need no other thread. If both lanes have
// a group in progress, one of their threads drives loop 0 for both, and the other one takes over
// when the first group has ended. Each other loop has a separate thread. A connection that is free
// takes the next chunk. With staging (wire_staging.h), every loop has a thread, and transfers may
// be in device memory: groups are posted and end by a call of WireStaging.
//
// Failures: a broken connection, a malformed frame or a late transfer ends the link to that peer:
// its transfers fail, now and later. Links to other peers are unaffected. A transfer fails only
// after every loop has closed its connections to the peer, so its memory is no longer in use.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_ENGINE_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/program/lane.h"
#include "worker/comm/communicator.h"
#include "worker/comm/wire/wire_counters.h"
#include "worker/comm/wire/wire_forming.h"
#include "worker/comm/wire/wire_group.h"
#include "worker/comm/wire/wire_loop.h"
#include "worker/comm/wire/wire_staging.h"

namespace ringattn::worker {

// Thread safe, except that one thread at a time calls Run for a lane.
class WireEngine {
 public:
  // `streams` as WireForming returns them. `staging`: for device memory; null: transfers are in
  // host memory. It outlives the engine. Either all ranks have one or none.
  WireEngine(int rank, WireStreams streams, std::shared_ptr<WireCounters> counters,
             WireStaging* staging = nullptr);
  // REQUIRES: no Run is in progress. With staging: Abort was called and all copies have ended.
  ~WireEngine();

  // Carries out the lane's group, all transfers at once, and returns when each of them has ended.
  // Returns the error of the first one that failed: UNAVAILABLE, naming the peer and the cause. A
  // transfer that lasts longer than `timeout` ends the link to its peer. Adds to *progress for
  // every completed transfer and every 16 MiB.
  //
  // REQUIRES: a group in progress in the other lane has other peers; no staging.
  absl::Status Run(Lane lane, const std::vector<PeerTransfer>& group, absl::Duration timeout,
                   std::atomic<int64_t>* progress);

  // With staging: starts the lane's group and returns. WireStaging::OnGroupEnd follows, also after
  // Abort. `group` must stay valid until then. REQUIRES: the lane's last group has ended, and a
  // group in progress in the other lane has other peers.
  void Begin(Lane lane, const std::vector<PeerTransfer>& group);
  // Returns the next chunk of a send that its receiver has granted, to be copied from `device` to a
  // slot and passed to EndSendCopy; false if there is none.
  bool TakeCopy(WireCopy* copy);
  // The copies have ended. After an error, the link to the peer ends.
  void EndSendCopy(const WireCopy& copy, const absl::Status& status);
  void EndReceive(const WireCopy& copy, const absl::Status& status);
  // Returns whether transfers with the rank are possible, in principle.
  bool HasPeer(int peer) const {
    return peer >= 0 && peer < static_cast<int>(peers_.size()) && peers_[peer] != nullptr;
  }

  // A peer that takes no bytes keeps at most so many slots.
  static constexpr int kStagedPerPeer = 16;

  // Ends the link to one peer. No effect if it has ended. Never blocks.
  void LosePeer(int peer, const std::string& reason);

  // Ends the links to all peers, and with them a Run in progress. Never blocks.
  void Abort(const std::string& reason);

 private:
  class Peer;

  // Posts the group and returns the peers with which something is to be exchanged.
  std::vector<Peer*> Post(WireGroup& posted, const std::vector<PeerTransfer>& group,
                          std::atomic<int64_t>* progress) ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets the peers' connections write what they can.
  void Push(const std::vector<Peer*>& peers) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the group has ended or no thread drives loop 0. In the second case this thread
  // drives it from now on. Returns false if it waited until `deadline`.
  bool EndsOrDrives(const WireGroup& group, absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets another thread drive loop 0 if this one does.
  void StopDriving() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLateTransfers(WireGroup& group, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // The last transfer of a group has ended.
  void OnGroupEnd(Lane lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Connections that wait for a slot try again.
  void OnFreeReceiveSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeAll();

  const std::shared_ptr<WireCounters> counters_;
  WireStaging* const staging_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> unreported_progress_{0};  // of groups with staging

  absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  WireGroup groups_[kLanes];                        // guarded by mutex_
  std::thread::id driver_ ABSL_GUARDED_BY(mutex_);  // the thread that drives loop 0, if any

  bool waits_slot_ ABSL_GUARDED_BY(mutex_) = false;  // a connection needs a slot
  int next_copy_ ABSL_GUARDED_BY(mutex_) = 0;        // the peer whose sends are staged next
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for this rank and without streams
  std::vector<std::unique_ptr<WireLoop>> loops_;
  std::vector<std::thread> threads_;  // of all loops but the first; with staging, of all
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_ENGINE_H_
