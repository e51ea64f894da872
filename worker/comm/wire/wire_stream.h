// WireStream: one TCP connection to a peer, in plain text or TLS 1.3. Never blocks.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_STREAM_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_STREAM_H_

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/security/tls_material.h"
#include "worker/comm/wire/wire_counters.h"

namespace ringattn::worker {

// Not thread safe, except for Shutdown(), which may be called during any other call.
class WireStream {
 public:
  struct Result {
    size_t bytes = 0;
    WireFailure failure = WireFailure::kNone;
    std::string why;  // of a failure

    bool ok() const { return failure == WireFailure::kNone; }
  };

  // Takes ownership of a non-blocking socket. Plain text.
  explicit WireStream(int fd) : fd_(fd) {}
  virtual ~WireStream();

  WireStream(const WireStream&) = delete;
  WireStream& operator=(const WireStream&) = delete;

  int fd() const { return fd_; }

  // Makes progress with the TLS handshake. Returns 1 byte when it is complete, 0 while it is not.
  virtual Result Handshake() { return {.bytes = 1}; }
  // Returns a secret that only the two ends of this TLS session know; empty in plain text.
  // REQUIRES: the handshake is complete.
  virtual std::string Binding() { return ""; }

  // Read or write at least one byte, or nothing if that would block. After a write of nothing, the
  // next one must start with the same bytes.
  virtual Result Read(char* data, size_t bytes);
  virtual Result Write(const iovec* parts, int count);

  // Returns true if bytes can be read although the socket may not be readable.
  virtual bool HasBuffered() const { return false; }
  // Returns true if records wait until the socket is writable, and sends them.
  virtual bool WantsWrite() const { return false; }
  virtual Result Flush() { return {}; }

  // Ends the connection at both ends: pending and later reads and writes fail.
  void Shutdown();

  // Returns the result of a failed system call.
  static Result Failed(int error);

 protected:
  const int fd_;
};

// Makes TLS streams whose two ends verify each other's certificate against the cluster's
// authorities. Thread safe.
class WireTls {
 public:
  virtual ~WireTls() = default;

  // Returns INVALID_ARGUMENT unless the material has a certificate, its key and authorities.
  static absl::StatusOr<std::shared_ptr<WireTls>> Make(const TlsMaterial& material);

  // Wraps a connected non-blocking socket.
  virtual std::unique_ptr<WireStream> Wrap(int fd, bool connector) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_STREAM_H_
