#include "worker/comm/wire/wire_connection.h"

#include <sys/uio.h>

#include <algorithm>

namespace ringattn::worker {
namespace {

// How much a connection moves in one direction before others get their turn.
constexpr size_t kTurnBytes = 4 << 20;

}  // namespace

bool WireConnection::Work(bool readable, Rest* rest) {
  WireStream::Result result;
  if (readable) result = ReadFrames(rest);
  if (result.ok()) result = WriteFrames(&rest->wants_write);
  if (result.ok()) {
    rest->wants_write = rest->wants_write || stream_->WantsWrite();
    return true;
  }
  peer_->OnFailure(result);
  return false;
}

WireStream::Result WireConnection::ReadFrames(Rest* rest) {
  rest->reads_more = false;
  for (size_t moved = 0; moved < kTurnBytes;) {
    absl::Status status;
    WireStream::Result result;
    if (reader_.waits_memory()) {
      status = reader_.Resume(*this);
    } else {
      const FrameReader::Buffer buffer = reader_.Next();
      result = stream_->Read(buffer.data, buffer.bytes);
      if (!result.ok() || result.bytes == 0) return result;
      status = reader_.Advance(result.bytes, *this);
    }
    if (!status.ok()) {
      const bool sizes = absl::IsFailedPrecondition(status);
      return {.failure = sizes ? WireFailure::kSizes : WireFailure::kProtocol,
              .why = std::string(status.message())};
    }
    rest->waits_memory = reader_.waits_memory();
    if (rest->waits_memory) return {};
    moved += result.bytes;
  }
  rest->reads_more = stream_->HasBuffered();
  return {};
}

WireStream::Result WireConnection::WriteFrames(bool* wants_write) {
  *wants_write = false;
  for (size_t moved = 0;;) {
    if (head_.empty() && payload_bytes_ == 0 && !TakeFrame()) return stream_->Flush();
    if (moved >= kTurnBytes) break;
    const iovec parts[2] = {{head_.data() + head_sent_, head_.size() - head_sent_},
                            {const_cast<char*>(payload_), payload_bytes_}};
    const bool has_head = !head_.empty();
    WireStream::Result result =
        stream_->Write(has_head ? parts : parts + 1, has_head && payload_bytes_ > 0 ? 2 : 1);
    if (!result.ok()) return result;
    if (result.bytes == 0) break;
    moved += result.bytes;
    Advance(result.bytes);
  }
  *wants_write = true;
  return {};
}

bool WireConnection::TakeFrame() {
  head_sent_ = 0;
  chunk_ = peer_->TakeChunk(stripe_, &head_);
  if (chunk_.transfer != nullptr) {
    AppendFrame(chunk_.frame, &head_);
    payload_ = chunk_.data;
    payload_bytes_ = chunk_.frame.length;
  }
  return !head_.empty();
}

void WireConnection::Advance(size_t bytes) {
  const size_t of_head = std::min(bytes, head_.size() - head_sent_);
  head_sent_ += of_head;
  if (head_sent_ == head_.size()) {
    head_.clear();
    head_sent_ = 0;
  }
  payload_ += bytes - of_head;
  payload_bytes_ -= bytes - of_head;
  if (!head_.empty() || payload_bytes_ > 0 || chunk_.transfer == nullptr) return;
  peer_->OnSent(std::exchange(chunk_, {}));
}

}  // namespace ringattn::worker
