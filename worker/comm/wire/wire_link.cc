#include "worker/comm/wire/wire_link.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {

void WireLink::Fail(WireFailure failure, absl::Status status) {
  failure_ = failure;
  status_ = std::move(status);
  unassigned_.clear();
  receiving_.clear();
}

// --------------------------------------------------------------------- sending

absl::Status WireLink::PostSend(WireTransfer* send) {
  send->sequence = sends_++;
  const int64_t bytes = send->transfer->bytes;
  if (grants_ahead_.empty()) {
    ungranted_.push_back({bytes, false});
  } else {
    const int64_t expected = grants_ahead_.front();
    grants_ahead_.pop_front();
    if (expected != bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("it expects ", expected, " bytes, but ", bytes, " are to be sent"));
    }
  }
  unassigned_.push_back(send);
  return absl::OkStatus();
}

WireChunk WireLink::TakeChunk(int stripe) {
  if (failed() || unassigned_.empty()) return {};
  WireTransfer* const send = unassigned_.front();
  const int64_t bytes = send->transfer->bytes;
  if (send->sequence >= grants_) {
    if (!runs_ahead_ || stripe != 0 || bytes > kEagerBytes ||
        eager_sent_bytes_ + bytes > kEagerCredit) {
      return {};
    }
    ungranted_[send->sequence - grants_].sent = true;
    eager_sent_bytes_ += bytes;
  }
  WireChunk chunk;
  chunk.transfer = send;
  chunk.data = static_cast<const char*>(send->transfer->data) + send->assigned_bytes;
  const int64_t length = std::min<int64_t>(bytes - send->assigned_bytes, kChunkBytes);
  chunk.frame = {.kind = WireFrame::Kind::kData,
                 .length = static_cast<uint32_t>(length),
                 .sequence = send->sequence,
                 .offset = static_cast<uint64_t>(send->assigned_bytes),
                 .total = static_cast<uint64_t>(bytes)};
  send->assigned_bytes += length;
  if (send->assigned_bytes == bytes) unassigned_.pop_front();
  return chunk;
}

size_t WireLink::ChunksForOthers() const {
  if (unassigned_.empty()) return 0;
  const WireTransfer& send = *unassigned_.front();
  if (send.sequence >= grants_) return 0;
  const auto remaining = static_cast<uint64_t>(send.transfer->bytes - send.assigned_bytes);
  return (remaining - 1) / kChunkBytes;
}

absl::Status WireLink::OnGrant(const WireFrame& frame) {
  if (failed()) return status_;
  if (frame.sequence != grants_) {
    return absl::InvalidArgumentError(
        absl::StrCat("grant ", frame.sequence, " instead of ", grants_));
  }
  const auto total = static_cast<int64_t>(frame.total);
  if (ungranted_.empty()) {
    if (grants_ahead_.size() >= kMaxGrantsAhead) {
      return absl::InvalidArgumentError(absl::StrCat(kMaxGrantsAhead, " grants ahead"));
    }
    grants_ahead_.push_back(total);
  } else {
    const Ungranted send = ungranted_.front();
    ungranted_.pop_front();
    if (send.bytes != total) {
      return absl::FailedPreconditionError(
          absl::StrCat("it expects ", total, " bytes, but ", send.bytes, " are to be sent"));
    }
    if (send.sent) eager_sent_bytes_ -= total;
  }
  ++grants_;
  return absl::OkStatus();
}

// ------------------------------------------------------------------- receiving

absl::Status WireLink::PostReceive(WireTransfer* receive, WireFrame* grant) {
  receive->sequence = receives_++;
  const auto bytes = static_cast<uint64_t>(receive->transfer->bytes);
  *grant = {.kind = WireFrame::Kind::kGrant, .sequence = receive->sequence, .total = bytes};
  receive->arrived.resize((bytes + kChunkBytes - 1) / kChunkBytes);
  const auto eager = eager_.find(receive->sequence);
  if (eager == eager_.end()) {
    receiving_[receive->sequence] = receive;
    return absl::OkStatus();
  }
  if (eager->second.bytes.size() != bytes) {
    return absl::FailedPreconditionError(absl::StrCat("it sent ", eager->second.bytes.size(),
                                                      " bytes, but ", bytes, " are expected"));
  }
  if (!eager->second.complete) {
    receive->arrived[0] = true;
    receiving_[receive->sequence] = receive;  // OnDataEnd copies it
    return absl::OkStatus();
  }
  std::memcpy(receive->transfer->data, eager->second.bytes.data(), bytes);
  eager_bytes_ -= static_cast<int64_t>(bytes);
  eager_.erase(eager);
  receive->group->Move(receive, static_cast<int64_t>(bytes));
  return absl::OkStatus();
}

absl::StatusOr<char*> WireLink::OnData(int stripe, const WireFrame& frame) {
  if (failed()) return status_;
  const auto total = static_cast<int64_t>(frame.total);
  const auto found = receiving_.find(frame.sequence);
  if (found != receiving_.end()) {
    WireTransfer* const receive = found->second;
    if (receive->transfer->bytes != total) {
      return absl::FailedPreconditionError(absl::StrCat("it sent ", total, " bytes, but ",
                                                        receive->transfer->bytes, " are expected"));
    }
    const uint64_t chunk = frame.offset / kChunkBytes;
    if (receive->arrived[chunk]) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " came twice"));
    }
    receive->arrived[chunk] = true;
    return static_cast<char*>(receive->transfer->data) + frame.offset;
  }
  if (!runs_ahead_ || stripe != 0 || frame.sequence < receives_ || total > kEagerBytes ||
      eager_bytes_ + total > kEagerCredit || eager_.count(frame.sequence) > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(total, " bytes of transfer ", frame.sequence, " exceed what it may send"));
  }
  Eager& eager = eager_[frame.sequence];
  eager.bytes.resize(frame.total);
  eager_bytes_ += total;
  return eager.bytes.data();
}

absl::Status WireLink::OnDataEnd(const WireFrame& frame) {
  if (failed()) return status_;
  const auto eager = eager_.find(frame.sequence);
  const auto found = receiving_.find(frame.sequence);
  if (eager != eager_.end()) {
    eager->second.complete = true;
    if (found == receiving_.end()) return absl::OkStatus();
    // Its receive was posted while it arrived.
    std::memcpy(found->second->transfer->data, eager->second.bytes.data(), frame.length);
    eager_bytes_ -= static_cast<int64_t>(frame.length);
    eager_.erase(eager);
  }
  WireTransfer* const receive = found->second;
  const bool complete = receive->moved_bytes + frame.length == frame.total;
  if (complete) receiving_.erase(found);
  receive->group->Move(receive, frame.length);
  return absl::OkStatus();
}

}  // namespace ringattn::worker
