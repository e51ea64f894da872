// FrameReader: divides the bytes of one connection into frames. Payloads are read directly into
// their target.
//
//   const FrameReader::Buffer buffer = reader.Next();
//   const size_t n = ... read at most buffer.bytes bytes into buffer.data ...
//   if (absl::Status status = reader.Advance(n, sink); !status.ok()) ... close the connection ...
#ifndef RINGATTN_WORKER_COMM_WIRE_FRAME_READER_H_
#define RINGATTN_WORKER_COMM_WIRE_FRAME_READER_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/wire/wire_frame.h"

namespace ringattn::worker {

// Receives the frames of one connection. An error ends the connection.
class FrameSink {
 public:
  virtual ~FrameSink() = default;

  virtual absl::Status OnGrant(const WireFrame& frame) = 0;
  // Returns memory for frame.length bytes, which stays valid until OnDataEnd or the connection's
  // end. Null: there is none now, and FrameReader::Resume calls this again.
  virtual absl::StatusOr<char*> OnData(const WireFrame& frame) = 0;
  // The payload is complete.
  virtual absl::Status OnDataEnd(const WireFrame& frame) = 0;
};

// Not thread safe.
class FrameReader {
 public:
  struct Buffer {
    char* data = nullptr;
    size_t bytes = 0;  // never 0
  };

  // Returns where the next bytes of the connection belong. REQUIRES: !waits_memory().
  Buffer Next();

  // The first `bytes` bytes of Next() have been filled. Errors: INVALID_ARGUMENT for a malformed
  // frame, or the sink's; nothing more may be read then. REQUIRES: bytes <= Next().bytes.
  absl::Status Advance(size_t bytes, FrameSink& sink);

  // Returns true if a payload follows for which the sink had no memory.
  bool waits_memory() const { return waits_memory_; }
  // Asks the sink for it again. Errors: the sink's. REQUIRES: waits_memory().
  absl::Status Resume(FrameSink& sink);

 private:
  char header_[kFrameBytes];
  size_t filled_ = 0;        // of the header, or of the payload
  char* payload_ = nullptr;  // null while the header is incomplete
  bool waits_memory_ = false;
  WireFrame frame_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_FRAME_READER_H_
