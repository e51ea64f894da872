// WireLink: which bytes one rank may send to one peer, and where those that it receives belong. No
// I/O: frames in, chunks and grants out.
//
// Flow control: a receive, once posted, grants its sender all of its bytes, because its memory is
// their target. Without a grant, a rank sends only transfers of at most kEagerBytes, and at most
// kEagerCredit bytes of them per peer. The receiver keeps those in a buffer until it posts the
// receive. So a peer cannot force it to store more than kEagerCredit bytes of tensors, in at most
// as many transfers, and kMaxGrantsAhead grants.
//
// Tests: wire_link_test.cc
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_LINK_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/wire/wire_counters.h"
#include "worker/comm/wire/wire_frame.h"
#include "worker/comm/wire/wire_group.h"

namespace ringattn::worker {

// Not thread safe: the engine's mutex guards it.
class WireLink {
 public:
  // `runs_ahead`: both ranks send small transfers before their grant.
  explicit WireLink(bool runs_ahead = true) : runs_ahead_(runs_ahead) {}

  // Posts a transfer of a group, which it stays part of until it ends. Returns FAILED_PRECONDITION
  // if the peer gives it another size. REQUIRES: the link has not failed, and the transfer has
  // bytes.
  absl::Status PostSend(WireTransfer* send);
  // Stores the grant to send to the peer in *grant, also on errors.
  absl::Status PostReceive(WireTransfer* receive, WireFrame* grant);

  // Returns a chunk for connection `stripe` to send, or none.
  WireChunk TakeChunk(int stripe);
  // Returns how many more chunks there are for connections to take after the next one, if the peer
  // has granted their transfer.
  size_t ChunksForOthers() const;

  // Take a frame that a connection has received. Errors: INVALID_ARGUMENT if the protocol forbids
  // it, FAILED_PRECONDITION if the ranks disagree about a size, the link's status if it has failed.
  absl::Status OnGrant(const WireFrame& frame);
  // Returns the memory for the frame's payload.
  absl::StatusOr<char*> OnData(int stripe, const WireFrame& frame);
  absl::Status OnDataEnd(const WireFrame& frame);

  // Ends the link: no later frame is taken or sent. Its transfers stay in the group, unfinished,
  // because connections may still use their memory. REQUIRES: it has not failed.
  void Fail(WireFailure failure, absl::Status status);
  bool failed() const { return failure_ != WireFailure::kNone; }
  const absl::Status& status() const { return status_; }

  static constexpr int64_t kEagerBytes = 8 << 10;
  static constexpr int64_t kEagerCredit = 64 << 10;
  // A peer's grants ahead of the sends here. A group has at most a few transfers per peer.
  static constexpr size_t kMaxGrantsAhead = 1 << 16;

 private:
  // A posted send whose grant has not arrived.
  struct Ungranted {
    int64_t bytes = 0;
    bool sent = false;  // eagerly
  };
  // A transfer that arrived before its receive was posted.
  struct Eager {
    std::string bytes;
    bool complete = false;
  };

  const bool runs_ahead_;
  WireFailure failure_ = WireFailure::kNone;
  absl::Status status_;  // once failed

  // Sending.
  uint64_t sends_ = 0;                    // posted
  uint64_t grants_ = 0;                   // arrived
  std::deque<int64_t> grants_ahead_;      // their sizes, for sends grants_ - size ... of grants_
  std::deque<Ungranted> ungranted_;       // sends [grants_, sends_)
  int64_t eager_sent_bytes_ = 0;          // of ungranted_
  std::deque<WireTransfer*> unassigned_;  // sends with bytes that no connection has taken

  // Receiving.
  uint64_t receives_ = 0;                        // posted
  std::map<uint64_t, WireTransfer*> receiving_;  // by sequence
  std::map<uint64_t, Eager> eager_;              // by sequence
  int64_t eager_bytes_ = 0;                      // of eager_
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_LINK_H_
