// WireHandshake: how two ranks of a ring prove to each other, on a new connection, that they know
// the ring's token. No I/O: messages in, messages out.
//
//   connector -> acceptor   hello: magic, generation, both ranks, stripe, nonce
//   acceptor -> connector   magic, nonce, proof
//   connector -> acceptor   proof
//   acceptor -> connector   magic
//
// A proof is an HMAC of both nonces under the token, so the token never travels and a proof cannot
// be replayed. It also covers the TLS session (RFC 5705 exporter), so the owner of another
// certificate of the cluster cannot relay it as a man in the middle.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_HANDSHAKE_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_HANDSHAKE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ringattn::worker {

struct WireHandshakeOptions {
  uint64_t generation = 0;
  int rank = 0;  // of this end
  std::string token;
  std::string binding;  // of the TLS session; empty in plain text
};

// Not thread safe.
class WireHandshake {
 public:
  // Connects stripe `stripe` to rank `peer`.
  static WireHandshake Connector(WireHandshakeOptions options, int peer, int stripe);
  // `world_size` and `stripes` bound what the connector may name. It must have a higher rank.
  static WireHandshake Acceptor(WireHandshakeOptions options, int world_size, int stripes);

  // Returns the bytes to send, and forgets them.
  std::string TakeOutput();
  // Returns the size of the next message; 0: the handshake is complete. Output may remain.
  size_t wanted() const { return wanted_; }
  // Takes the next message. Errors: INVALID_ARGUMENT if it is malformed or names another ring or
  // rank, PERMISSION_DENIED if the peer does not know the token. REQUIRES: its size is wanted() >
  // 0.
  absl::Status Take(absl::string_view message);

  // An acceptor learns both from the hello.
  int peer() const { return peer_; }
  int stripe() const { return stripe_; }

  static constexpr size_t kLongestMessage = 96;

 private:
  enum class Step { kAwaitHello, kAwaitAnswer, kAwaitProof, kAwaitAccept, kDone };

  WireHandshake(WireHandshakeOptions options) : options_(std::move(options)) {}

  absl::Status TakeHello(absl::string_view hello);
  absl::Status TakeAnswer(absl::string_view answer);
  // Returns the proof of the connector or of the acceptor.
  std::string Proof(absl::string_view who) const;

  const WireHandshakeOptions options_;
  int world_size_ = 0;
  int stripes_ = 0;
  int peer_ = -1;
  int stripe_ = -1;
  Step step_ = Step::kDone;
  size_t wanted_ = 0;
  std::string output_;
  std::string hello_;
  std::string nonce_;  // of the acceptor
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_HANDSHAKE_H_
