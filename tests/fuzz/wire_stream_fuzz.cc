// For every input of a peer, the ring's sockets stay inside their buffers: blobs, both ends of the
// handshake, and frames. The first byte chooses which, and how the rest is cut into reads.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "worker/comm/wire/frame_reader.h"
#include "worker/comm/wire/wire_blob.h"
#include "worker/comm/wire/wire_frame.h"
#include "worker/comm/wire/wire_handshake.h"

namespace {

using namespace ringattn::worker;  // NOLINT: short test program

void Require(bool condition) {
  if (!condition) std::abort();
}

// Checks what the engine relies on, and allocates a separate heap block for each payload.
class CheckingSink : public FrameSink {
 public:
  absl::Status OnGrant(const WireFrame& frame) override {
    Require(frame.length == 0 && frame.offset == 0);
    Require(frame.total > 0 && frame.total <= kMaxTransferBytes);
    return absl::OkStatus();
  }
  absl::StatusOr<char*> OnData(const WireFrame& frame) override {
    Require(frame.length > 0 && frame.length <= kChunkBytes);
    Require(frame.offset % kChunkBytes == 0 && frame.total <= kMaxTransferBytes);
    Require(frame.offset + frame.length <= frame.total);
    if (frame.sequence % 7 == 6) return absl::InvalidArgumentError("unasked for");
    target_.assign(frame.length, '\0');
    return target_.data();
  }
  absl::Status OnDataEnd(const WireFrame& frame) override {
    Require(target_.size() == frame.length);
    target_ = {};
    return absl::OkStatus();
  }

 private:
  std::vector<char> target_;
};

void ReadFrames(absl::string_view bytes, size_t most) {
  FrameReader reader;
  CheckingSink sink;
  while (!bytes.empty()) {
    const FrameReader::Buffer buffer = reader.Next();
    Require(buffer.bytes > 0);
    const size_t n = std::min({most, buffer.bytes, bytes.size()});
    std::memcpy(buffer.data, bytes.data(), n);
    bytes.remove_prefix(n);
    if (!reader.Advance(n, sink).ok()) return;
  }
}

// A handshake must not complete without the token.
void Handshake(WireHandshake handshake, absl::string_view bytes) {
  while (bytes.size() >= handshake.wanted()) {
    const std::string message(bytes.substr(0, handshake.wanted()));
    bytes.remove_prefix(message.size());
    if (!handshake.Take(message).ok()) return;
    Require(handshake.wanted() > 0 && handshake.wanted() <= WireHandshake::kLongestMessage);
    Require(handshake.peer() >= 0 && handshake.peer() < 8);
  }
}

void ReadBlob(absl::string_view bytes) {
  const auto blob = ParseWireBlob(bytes);
  if (blob.ok()) Require(FormatWireBlob(*blob) == bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const WireHandshakeOptions options{7, 2, std::string(32, 't'), ""};
  switch (data[0] & 3) {
    case 0:
      ReadFrames(bytes, 1 + (data[0] >> 2));
      break;
    case 1:
      Handshake(WireHandshake::Acceptor(options, 8, 4), bytes);
      break;
    case 2:
      Handshake(WireHandshake::Connector(options, 1, 0), bytes);
      break;
    default:
      ReadBlob(bytes);
  }
  return 0;
}
