#include "worker/comm/tcp/tcp_communicator.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

// Long enough that a round trip (0.2 ms) is short compared with its duration (5 ms at 3 GB/s).
// Short enough that closing a pair, which waits for the segment being read, is quick, and that a
// slow link still shows progress.
constexpr int64_t kSegmentBytes = int64_t{16} << 20;

int64_t SegmentCount(int64_t bytes) { return (bytes + kSegmentBytes - 1) / kSegmentBytes; }

// Returns the value on which a send and its receive must agree. It includes the size, so that ranks
// that disagree about sizes time out instead of writing outside a buffer.
uint64_t SlotOf(uint64_t sequence, int64_t bytes) {
  static_assert(kSegmentBytes < int64_t{1} << 26);
  return sequence << 26 | static_cast<uint64_t>(bytes);
}

}  // namespace

TcpCommunicator::TcpCommunicator(std::shared_ptr<TcpMesh> mesh, absl::Duration step_timeout)
    : mesh_(std::move(mesh)),
      step_timeout_(step_timeout),
      sent_(mesh_->world_size()),
      received_(mesh_->world_size()),
      lost_(mesh_->world_size()) {
  mesh_->Watch([this](int peer, const std::string& reason) {
    LosePeer(peer, absl::StrCat("the peer is gone: ", reason));
  });
}

TcpCommunicator::~TcpCommunicator() {
  // Queued groups might otherwise wait for peers that are gone.
  Abort("the communicator was closed");
  mesh_->StopWatching();
}

EventRef TcpCommunicator::StartInLane(Lane lane, std::vector<PeerTransfer> group,
                                      std::vector<EventRef> after, RunControl* control) {
  return queues_[IndexOf(lane)].Start(
      [this, lane, group = std::move(group), control] { return Run(lane, group, control); },
      std::move(after), HostQueue::OnFailure::kRun);
}

void TcpCommunicator::Abort(const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  AbortWaits(std::nullopt);
}

void TcpCommunicator::LosePeer(int peer, const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (aborted_ || !lost_[peer].empty()) return;
  lost_[peer] = reason;
  AbortWaits(peer);
}

// Ends the waits for segments in flight, with one peer or with all.
void TcpCommunicator::AbortWaits(std::optional<int> peer) {
  for (const std::vector<const Wave*>& waves : in_flight_) {
    for (const Wave* wave : waves) {
      for (const Segment& segment : *wave) {
        if (peer && segment.transfer->peer != *peer) continue;
        if (segment.transfer->kind == Kind::kSend) {
          segment.buffer->abortWaitSend();
        } else {
          segment.buffer->abortWaitRecv();
        }
      }
    }
  }
}

absl::Status TcpCommunicator::Run(Lane lane, const std::vector<PeerTransfer>& group,
                                  RunControl* control) {
  absl::Status status = RunWaves(lane, group, control);
  if (status.ok()) return status;
  // Half-sent data cannot be resumed, and peers must learn of the failure.
  if (AbortedStatus().ok()) {
    ClosePeers();
  } else {
    mesh_->Close();
  }
  return status;
}

absl::Status TcpCommunicator::RunWaves(Lane lane, const std::vector<PeerTransfer>& group,
                                       RunControl* control) {
  int64_t wave_count = 0;
  for (const PeerTransfer& transfer : group) {
    wave_count = std::max(wave_count, SegmentCount(transfer.bytes));
    if (transfer.bytes == 0) control->progress.fetch_add(1, std::memory_order_relaxed);
  }
  const absl::Time deadline = MonotonicNow() + step_timeout_;
  Wave now, next;
  absl::Status failure = AbortedStatus();
  if (!failure.ok()) return failure;
  Post(group, 0, &now, &failure);
  for (int64_t index = 0; index < wave_count; ++index) {
    if (index + 1 < wave_count) Post(group, index + 1, &next, &failure);
    SetInFlight(lane, {&now, &next});
    const absl::Status end = Wait(now, deadline, control, &failure);
    SetInFlight(lane, {});
    if (!end.ok()) return end;
    now = std::move(next);
    next.clear();
  }
  return failure;
}

void TcpCommunicator::Post(const std::vector<PeerTransfer>& group, int64_t wave_index, Wave* wave,
                           absl::Status* failure) {
  for (const PeerTransfer& transfer : group) {
    const int64_t offset = wave_index * kSegmentBytes;
    const int64_t bytes = std::min(transfer.bytes - offset, kSegmentBytes);
    if (bytes <= 0) continue;
    absl::Status status = StatusOf(transfer.peer);
    if (status.ok()) {
      try {
        wave->push_back(
            {mesh_->NewBuffer(static_cast<char*>(transfer.data) + offset, bytes), &transfer});
        if (transfer.kind == Kind::kSend) {
          wave->back().buffer->send(transfer.peer, SlotOf(sent_[transfer.peer]++, bytes));
        } else {
          wave->back().buffer->recv(transfer.peer, SlotOf(received_[transfer.peer]++, bytes));
        }
      } catch (const std::exception& error) {
        LosePeer(transfer.peer, absl::StrCat("the peer is gone: ", error.what()));
        status = StatusOf(transfer.peer);
      }
    }
    if (failure->ok()) *failure = std::move(status);
  }
}

absl::Status TcpCommunicator::Wait(const Wave& wave, absl::Time deadline, RunControl* control,
                                   absl::Status* failure) {
  for (const Segment& segment : wave) {
    // A peer that was lost before SetInFlight had no wait to interrupt.
    absl::Status status = StatusOf(segment.transfer->peer);
    if (status.ok()) status = WaitFor(segment, deadline);
    if (status.ok()) {
      control->progress.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    if (failure->ok()) *failure = std::move(status);
    if (!AbortedStatus().ok()) return *failure;
  }
  return absl::OkStatus();
}

absl::Status TcpCommunicator::WaitFor(const Segment& segment, absl::Time deadline) {
  const PeerTransfer& transfer = *segment.transfer;
  const bool send = transfer.kind == Kind::kSend;
  const auto remaining =
      std::max(absl::ToChronoMilliseconds(deadline - MonotonicNow()), std::chrono::milliseconds(1));
  try {
    const bool completed =
        send ? segment.buffer->waitSend(remaining) : segment.buffer->waitRecv(remaining);
    return completed ? absl::OkStatus() : StatusOf(transfer.peer);
  } catch (const std::exception& error) {
    const bool late = MonotonicNow() >= deadline;
    if (!late) {
      LosePeer(transfer.peer, absl::StrCat("the peer is gone: ", error.what()));
      return StatusOf(transfer.peer);
    }
    // Gloo has closed every connection of the mesh.
    const std::string what =
        absl::StrCat(send ? "sending to rank " : "receiving from rank ", transfer.peer,
                     " took longer than ", absl::FormatDuration(step_timeout_), ": ", error.what());
    Abort(what);
    return absl::UnavailableError(what);
  }
}

void TcpCommunicator::SetInFlight(Lane lane, std::vector<const Wave*> waves) {
  absl::MutexLock lock(&mutex_);
  in_flight_[IndexOf(lane)] = std::move(waves);
}

absl::Status TcpCommunicator::AbortedStatus() const {
  absl::MutexLock lock(&mutex_);
  if (!aborted_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("ring aborted: ", reason_));
}

absl::Status TcpCommunicator::StatusOf(int peer) const {
  if (absl::Status aborted = AbortedStatus(); !aborted.ok()) return aborted;
  absl::MutexLock lock(&mutex_);
  if (lost_[peer].empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("lost rank ", peer, ": ", lost_[peer]));
}

void TcpCommunicator::ClosePeers() {
  for (int peer = 0; peer < mesh_->world_size(); ++peer) {
    if (peer != mesh_->rank() && !StatusOf(peer).ok()) mesh_->ClosePeer(peer);
  }
}

}  // namespace ringattn::worker
