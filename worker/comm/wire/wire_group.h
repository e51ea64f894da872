// WireGroup: the transfers of a group that a WireEngine carries out, and how far they are.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_GROUP_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_GROUP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"
#include "worker/comm/wire/wire_frame.h"

namespace ringattn::worker {

class WireGroup;

// One transfer of a group.
struct WireTransfer {
  WireGroup* group = nullptr;
  const PeerTransfer* transfer = nullptr;
  uint64_t sequence = 0;
  int64_t assigned_bytes = 0;  // send: bytes given to connections
  int64_t moved_bytes = 0;     // sent or received
  std::vector<bool> arrived;   // receive: chunks that have arrived or are arriving
  bool done = false;
  absl::Status status;

  int peer() const { return transfer->peer; }
  bool is_send() const { return transfer->kind == PeerTransfer::Kind::kSend; }
};

// A chunk of a send that a connection carries.
struct WireChunk {
  WireTransfer* transfer = nullptr;  // null: none
  WireFrame frame;
  const char* data = nullptr;
};

// Not thread safe: the engine's mutex guards it.
class WireGroup {
 public:
  // `on_end` is called when the last transfer of a group has ended.
  explicit WireGroup(std::function<void()> on_end) : on_end_(std::move(on_end)) {}

  // Begins a group, whose transfers stay valid until the next one. REQUIRES: the group before it
  // has ended.
  void Begin(const std::vector<PeerTransfer>& group, std::atomic<int64_t>* progress);

  std::vector<WireTransfer>& transfers() { return transfers_; }
  bool ended() const { return unfinished_ == 0; }
  // Returns the error of the first transfer that failed. REQUIRES: ended().
  absl::Status Result() const;

  // A transfer that moves nothing is complete.
  void MoveNothing(WireTransfer* transfer);
  // Bytes of the transfer were sent or received. Ends it if they were the last.
  void Move(WireTransfer* transfer, int64_t bytes);
  void End(WireTransfer* transfer, absl::Status status);

 private:
  const std::function<void()> on_end_;
  std::vector<WireTransfer> transfers_;  // not resized while any is in progress
  size_t unfinished_ = 0;                // of them
  std::atomic<int64_t>* progress_ = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_GROUP_H_
