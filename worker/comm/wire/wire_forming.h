// WireForming: makes all connections of one rank while a ring forms. Every pair has one connector,
// the higher rank.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_FORMING_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_FORMING_H_

#include <poll.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/wire/wire_blob.h"
#include "worker/comm/wire/wire_counters.h"
#include "worker/comm/wire/wire_handshake.h"
#include "worker/comm/wire/wire_stream.h"

namespace ringattn::worker {

struct WireFormingOptions {
  uint64_t generation = 0;
  int rank = 0;
  std::vector<WireBlob> blobs;   // by rank
  std::vector<int> peers;        // the ranks to connect to, without this one
  int listener = -1;             // listening socket
  int cancelled = -1;            // becomes readable to end the forming
  std::shared_ptr<WireTls> tls;  // null: plain text
  // How long an incoming connection may take to prove that it belongs to the ring.
  absl::Duration handshake_timeout = absl::Seconds(5);
  std::shared_ptr<WireCounters> counters;
};

// By rank, then by stripe. None for ranks that are not peers.
using WireStreams = std::vector<std::vector<std::unique_ptr<WireStream>>>;

// Not thread safe; used once. Incoming connections are handled at the same time, so one that stays
// silent does not delay others. At most kSpareHandshakes more than expected are open at a time; the
// oldest makes room.
class WireForming {
 public:
  explicit WireForming(WireFormingOptions options);

  // Connects to all peers. Errors:
  //   UNAVAILABLE  naming a peer and the cause: it cannot be reached, or not by `deadline`
  //   CANCELLED    options.cancelled became readable
  absl::StatusOr<WireStreams> Run(absl::Time deadline);

  static constexpr int kSpareHandshakes = 64;

 private:
  // One connection until it is complete.
  struct Attempt {
    std::unique_ptr<WireStream> stream;
    bool outgoing = false;
    bool connecting = false;  // the TCP connection is not made yet
    bool encrypted = false;   // the TLS handshake is complete, or there is none
    int peer = -1;            // outgoing
    int stripe = 0;
    std::string address;  // incoming: of the peer
    absl::Time deadline;
    std::optional<WireHandshake> handshake;
    std::string output;  // to send
    std::string input;   // of the next message
  };
  using Attempts = std::list<Attempt>;

  // Returns 0 for ranks that are not peers.
  int StripesWith(int peer) const;
  bool Complete() const { return missing_ == 0; }
  absl::Status Connect(int peer, int stripe, absl::Time deadline);
  void Accept();
  // Makes progress. `result` is set if the attempt has failed.
  bool Advance(Attempt& attempt, WireStream::Result* result);
  bool AdvanceMessages(Attempt& attempt, WireStream::Result* result);
  void BeginHandshake(Attempt& attempt);
  void Finish(Attempts::iterator attempt);
  // An attempt has failed. Returns an error if the ring cannot form without it.
  absl::Status Fail(Attempts::iterator attempt, const WireStream::Result& result,
                    absl::Time deadline);
  void Refuse(Attempts::iterator attempt, WireFailure failure, const std::string& why);
  absl::Status LateStatus() const;
  short EventsOf(const Attempt& attempt) const;

  const WireFormingOptions options_;
  std::string token_;
  std::vector<bool> is_peer_;  // by rank
  int missing_ = 0;            // connections
  int missing_incoming_ = 0;   // of them
  WireStreams streams_;
  Attempts attempts_;
  struct Retry {
    int peer = 0;
    int stripe = 0;
    absl::Time due;
  };
  std::vector<Retry> retries_;
  std::vector<int> tries_;  // by peer
  std::string refusal_;     // of an incoming connection, for the error message
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_FORMING_H_
