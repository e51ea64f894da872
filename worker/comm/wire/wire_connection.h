// WireConnection: sends and receives the frames of one connection between two ranks.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_CONNECTION_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/wire/frame_reader.h"
#include "worker/comm/wire/wire_frame.h"
#include "worker/comm/wire/wire_group.h"
#include "worker/comm/wire/wire_stream.h"

namespace ringattn::worker {

class WireConnection;

// What all connections to one peer share. Thread safe.
class WirePeer {
 public:
  virtual ~WirePeer() = default;

  // Returns the next chunk for connection `stripe`, or none. Appends the frames that precede it.
  virtual WireChunk TakeChunk(int stripe, std::string* frames) = 0;
  // The chunk has left.
  virtual void OnSent(const WireChunk& chunk) = 0;
  virtual absl::Status OnGrant(const WireFrame& frame) = 0;
  // Returns null if memory is missing now. The peer wakes the connection's loop once it has some.
  virtual absl::StatusOr<char*> OnData(int stripe, const WireFrame& frame) = 0;
  virtual absl::Status OnDataEnd(int stripe, const WireFrame& frame) = 0;

  // A connection has failed, which ends all others to the peer.
  virtual void OnFailure(const WireStream::Result& result) = 0;
  virtual bool failed() = 0;
  // Closes the connection. Excludes Shutdown.
  virtual void Close(WireConnection* connection) = 0;
};

// Used by one thread, except Shutdown.
class WireConnection : private FrameSink {
 public:
  // Connection `stripe` to the peer, which outlives it.
  WireConnection(WirePeer* peer, int stripe, std::unique_ptr<WireStream> stream)
      : peer_(peer), stripe_(stripe), stream_(std::move(stream)) {}

  WirePeer* peer() const { return peer_; }
  int fd() const { return stream_->fd(); }
  int stripe() const { return stripe_; }
  bool open() const { return stream_ != nullptr; }
  // The chunk that is being sent; its transfer is null if there is none.
  const WireChunk& chunk() const { return chunk_; }
  // REQUIRES: not during Shutdown.
  void Close() { stream_ = nullptr; }
  void Shutdown() {
    if (stream_ != nullptr) stream_->Shutdown();
  }

  // The work that a turn leaves.
  struct Rest {
    bool wants_write = false;   // there is more to write
    bool reads_more = false;    // there is more to read although the socket may not be readable
    bool waits_memory = false;  // nothing can be read until there is memory for it
  };
  // Reads, if `readable`, and writes what is possible in a turn. Returns false if the connection
  // has failed. Without `readable`, only wants_write is set.
  bool Work(bool readable, Rest* rest);

 private:
  absl::Status OnGrant(const WireFrame& frame) override { return peer_->OnGrant(frame); }
  absl::StatusOr<char*> OnData(const WireFrame& frame) override {
    return peer_->OnData(stripe_, frame);
  }
  absl::Status OnDataEnd(const WireFrame& frame) override {
    return peer_->OnDataEnd(stripe_, frame);
  }

  WireStream::Result ReadFrames(Rest* rest);
  WireStream::Result WriteFrames(bool* wants_write);
  // Prepares what to send next: grants and a chunk. Returns false if there is neither.
  bool TakeFrame();
  // Bytes of what TakeFrame prepared have been sent.
  void Advance(size_t bytes);

  WirePeer* const peer_;
  const int stripe_;
  std::unique_ptr<WireStream> stream_;
  FrameReader reader_;
  std::string head_;  // being sent, before the payload
  size_t head_sent_ = 0;
  const char* payload_ = nullptr;  // what remains
  size_t payload_bytes_ = 0;
  WireChunk chunk_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_CONNECTION_H_
