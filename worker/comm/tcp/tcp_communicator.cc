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
      received_(mesh_->world_size()) {
  mesh_->Watch([this](int peer, const std::string& reason) {
    Abort(absl::StrCat("lost the connection to rank ", peer, ": ", reason));
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
  for (const std::vector<const Wave*>& waves : in_flight_) {
    for (const Wave* wave : waves) {
      for (const Segment& segment : *wave) {
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
  if (!status.ok()) {
    // Half-sent data cannot be resumed, and peers must learn of the failure.
    mesh_->Close();
    Abort(std::string(status.message()));
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
  absl::Status status = AbortedStatus();
  if (status.ok() && wave_count > 0) status = Post(group, 0, &now);
  for (int64_t index = 0; status.ok() && index < wave_count; ++index) {
    if (index + 1 < wave_count) status = Post(group, index + 1, &next);
    SetInFlight(lane, {&now, &next});
    // An abort before SetInFlight had nothing to interrupt.
    if (status.ok()) status = AbortedStatus();
    if (status.ok()) status = Wait(now, deadline, control);
    SetInFlight(lane, {});
    now = std::move(next);
    next.clear();
  }
  return status;
}

absl::Status TcpCommunicator::Post(const std::vector<PeerTransfer>& group, int64_t wave_index,
                                   Wave* wave) {
  for (const PeerTransfer& transfer : group) {
    const int64_t offset = wave_index * kSegmentBytes;
    const int64_t bytes = std::min(transfer.bytes - offset, kSegmentBytes);
    if (bytes <= 0) continue;
    try {
      wave->push_back(
          {mesh_->NewBuffer(static_cast<char*>(transfer.data) + offset, bytes), &transfer});
      if (transfer.kind == Kind::kSend) {
        wave->back().buffer->send(transfer.peer, SlotOf(sent_[transfer.peer]++, bytes));
      } else {
        wave->back().buffer->recv(transfer.peer, SlotOf(received_[transfer.peer]++, bytes));
      }
    } catch (const std::exception& error) {
      return absl::UnavailableError(
          absl::StrCat("rank ", transfer.peer, " cannot be reached: ", error.what()));
    }
  }
  return absl::OkStatus();
}

absl::Status TcpCommunicator::Wait(const Wave& wave, absl::Time deadline, RunControl* control) {
  for (const Segment& segment : wave) {
    const PeerTransfer& transfer = *segment.transfer;
    const bool send = transfer.kind == Kind::kSend;
    const auto remaining = std::max(absl::ToChronoMilliseconds(deadline - MonotonicNow()),
                                    std::chrono::milliseconds(1));
    bool completed = false;
    try {
      completed = send ? segment.buffer->waitSend(remaining) : segment.buffer->waitRecv(remaining);
    } catch (const std::exception& error) {
      // A timeout closes every connection of the mesh, so the watch aborts as well. The first cause
      // counts.
      const bool late = MonotonicNow() >= deadline;
      if (absl::Status aborted = AbortedStatus(); !late && !aborted.ok()) return aborted;
      return absl::UnavailableError(absl::StrCat(
          send ? "sending to rank " : "receiving from rank ", transfer.peer,
          late ? absl::StrCat(" took longer than ", absl::FormatDuration(step_timeout_))
               : std::string(" failed"),
          ": ", error.what()));
    }
    if (!completed) return AbortedStatus();
    control->progress.fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
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

}  // namespace ringattn::worker
