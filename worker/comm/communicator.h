// Communicator: ordered groups of point-to-point transfers between the members of one generation.
// Implemented by in-process queues, sockets, NCCL and copy engines. The test cases in
// worker/comm/contract define the common behaviour.
#ifndef RINGATTN_WORKER_COMM_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/program/lane.h"
#include "worker/device/device.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// One transfer. `data` is memory of the communicator's device and must stay valid until the group's
// event is done.
struct PeerTransfer {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  int peer = 0;  // rank in the generation
  void* data = nullptr;
  int64_t bytes = 0;
};

// Thread safe. One thread starts groups. Groups of one lane run in the order in which they were
// started. Groups of different lanes do not wait for each other, and while both are in flight, they
// must not have a peer in common. The n-th send from a to b matches the n-th receive from a at b;
// their sizes must agree.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Returns what carries the bytes between this rank and `peer`, as a metrics label: "wire", "tcp",
  // "nccl", "peer", "peer_ipc". REQUIRES: 0 <= peer < world_size().
  virtual std::string transport(int peer) const = 0;
  // Returns true if transfers with `peer` use compute units of the device. A group with such a
  // transfer must be enqueued before calls that would occupy all units. False if copy engines move
  // the bytes. REQUIRES: 0 <= peer < world_size().
  virtual bool takes_compute_units(int peer) const = 0;

  // Returns whether lanes are independent of each other. If false, groups of all lanes run in one
  // order, so callers start a step's transfers as one group.
  virtual bool has_lanes() const { return false; }

  // Enqueues the group after earlier groups of its lane and after `after`. Its transfers run
  // concurrently, and the event is done when all of them are. Never blocks. A failed `after` does
  // not suppress the transfers unless the communicator is aborted, because peers wait for them.
  // Adds completed transfers to control->progress. If a transfer fails (peer lost, timeout, abort),
  // the event fails with UNAVAILABLE, and so do later groups: after an abort all of them, else at
  // least those with a transfer with that peer.
  virtual EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group,
                               std::vector<EventRef> after, RunControl* control) = 0;
  // The same in lane kInside.
  EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef> after,
                 RunControl* control) {
    return StartInLane(Lane::kInside, std::move(group), std::move(after), control);
  }

  // Wakes the links to peers, because a group will follow soon. NVLink sleeps after 50 ms without
  // traffic and takes 0.2 ms to wake up completely. Never blocks, is cheap, and may be called from
  // any thread. Affects timing only.
  virtual void WakeLinks() {}

  // The peer is lost. Ends transfers with it within a second, now and later. Transfers with other
  // peers go on if the implementation keeps them apart. This default does not: it aborts. May be
  // called from any thread, repeatedly. REQUIRES: `peer` is another rank of the generation.
  virtual void LosePeer(int peer, const std::string& reason);

  // Ends everything enqueued within a second. Later groups fail at once, even empty ones. May be
  // called from any thread, repeatedly.
  virtual void Abort(const std::string& reason) = 0;
};

inline void Communicator::LosePeer(int, const std::string& reason) { Abort(reason); }

// Creates communicators in the two phases of forming a ring.
class RingTransport {
 public:
  virtual ~RingTransport() = default;

  // Phase one: returns the blob to pass to every member. Replaces an earlier Prepare. Returns
  // INVALID_ARGUMENT unless 0 <= rank < world_size.
  virtual absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) = 0;

  // Phase two: connects, given all members' blobs by rank. Errors:
  //   UNAVAILABLE       a peer cannot be reached by `deadline`
  //   CANCELLED         the last Prepare was for another generation, or Cancel was called
  //   INVALID_ARGUMENT  the blobs do not belong to such a ring
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Connect(
      uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) = 0;

  // Ends a Connect in progress at once with CANCELLED, and drops what was prepared. May be called
  // from any thread. Never blocks for long.
  virtual void Cancel() = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_COMMUNICATOR_H_
