// Communicator: ordered groups of point-to-point transfers between the members of
// one generation. In-process queues, TCP, NCCL and copy engines implement it; the cases
// of worker/comm/contract say what all of them have in common.
#ifndef RINGATTN_WORKER_COMM_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/device/device.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// One transfer with its address. `data` is memory of the device that the
// communicator serves and stays valid until the group's event is done.
struct PeerTransfer {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  int peer = 0;  // rank in the generation
  void* data = nullptr;
  int64_t bytes = 0;
};

// Thread safe. Groups are started by one thread and run in that order. The n-th
// send from a to b matches the n-th receive from a in b; sizes must agree.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // What carries the bytes, a metrics label: "tcp", "nccl", "peer", "peer_ipc".
  virtual std::string transport() const = 0;
  // Transfers need units that compute on the device, so a group has to be enqueued before
  // calls that would take all of them. False: copy engines move the bytes.
  virtual bool takes_compute_units() const = 0;

  // Enqueues the group behind earlier groups and behind `after`; its transfers run
  // together, and the event is done when all of them are. Never blocks. A failed
  // `after` does not suppress the transfers unless the communicator is aborted:
  // peers wait for them. Counts completed transfers in control->progress.
  // Failure of a transfer (peer gone, timeout, abort) fails the event with
  // UNAVAILABLE and every later group at once.
  virtual EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef> after,
                         RunControl* control) = 0;

  // A group may come soon: what sleeps between the peers while nothing moves (NVLink after 50 ms,
  // and 0.2 ms until all of it is awake) is to be awake by then. Never blocks, costs little,
  // callable from any thread; of no consequence but for time.
  virtual void WakeLinks() {}

  // Ends everything enqueued, within a second; later groups fail at once, empty ones too.
  // Callable from any thread, repeatedly.
  virtual void Abort(const std::string& reason) = 0;
};

// Makes communicators in the two phases of ring forming.
class RingTransport {
 public:
  virtual ~RingTransport() = default;

  // Phase one. The blob goes to every member. A later Prepare supersedes.
  // INVALID_ARGUMENT unless 0 <= rank < world_size.
  virtual absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) = 0;

  // Phase two, with all members' blobs by rank. UNAVAILABLE if a peer cannot be
  // reached by `deadline`, CANCELLED if the last Prepare was not of that generation,
  // INVALID_ARGUMENT for blobs that are not those of such a ring.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Connect(
      uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) = 0;

  // Ends a Connect in progress at once, with CANCELLED, and forgets what was
  // prepared. Callable from any thread; never blocks for long.
  virtual void Cancel() = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_COMMUNICATOR_H_
