#include "worker/comm/wire/wire_group.h"

namespace ringattn::worker {
namespace {

// Each counts as progress, so that a slow link shows some.
constexpr int64_t kProgressBytes = int64_t{16} << 20;

}  // namespace

void WireGroup::Begin(const std::vector<PeerTransfer>& group, std::atomic<int64_t>* progress) {
  transfers_.clear();
  transfers_.resize(group.size());
  unfinished_ = group.size();
  progress_ = progress;
  for (size_t i = 0; i < group.size(); ++i) {
    transfers_[i].group = this;
    transfers_[i].transfer = &group[i];
  }
}

absl::Status WireGroup::Result() const {
  for (const WireTransfer& transfer : transfers_) {
    if (!transfer.status.ok()) return transfer.status;
  }
  return absl::OkStatus();
}

void WireGroup::MoveNothing(WireTransfer* transfer) {
  progress_->fetch_add(1, std::memory_order_relaxed);
  End(transfer, absl::OkStatus());
}

void WireGroup::Move(WireTransfer* transfer, int64_t bytes) {
  const int64_t before = transfer->moved_bytes;
  transfer->moved_bytes += bytes;
  const bool complete = transfer->moved_bytes == transfer->transfer->bytes;
  // A multiple of kProgressBytes at the very end counts once.
  int64_t steps = transfer->moved_bytes / kProgressBytes - before / kProgressBytes;
  if (complete && transfer->moved_bytes % kProgressBytes != 0) ++steps;
  progress_->fetch_add(steps, std::memory_order_relaxed);
  if (complete) End(transfer, absl::OkStatus());
}

void WireGroup::End(WireTransfer* transfer, absl::Status status) {
  transfer->done = true;
  transfer->status = std::move(status);
  if (--unfinished_ == 0) on_end_();
}

}  // namespace ringattn::worker
