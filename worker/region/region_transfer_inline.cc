// RegionTransfer: the copies of inline operations.
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "common/base/limits.h"
#include "common/wire/chunk_codec.h"
#include "worker/region/region_transfer.h"

namespace ringattn::worker {
namespace {

// Enqueuing a copy takes a few microseconds.
constexpr size_t kMaxRuns = 8;
// The CPU copies them in 0.4 ms at 10 GB/s.
constexpr int64_t kMaxHostBytes = 4 * kMiB;

// Joins runs that are adjacent on both sides.
std::vector<ByteRun> Joined(const std::vector<ByteRun>& runs) {
  std::vector<ByteRun> joined;
  for (const ByteRun& run : runs) {
    if (!joined.empty()) {
      ByteRun& last = joined.back();
      if (last.rank == run.rank && last.global_offset + last.bytes == run.global_offset &&
          last.local_offset + last.bytes == run.local_offset) {
        last.bytes += run.bytes;
        continue;
      }
    }
    joined.push_back(run);
  }
  return joined;
}

// The runs of a whole shard.
std::vector<ByteRun> RunsOf(const RegionTransfer::TensorCopy& copied, int rank) {
  return Joined(copied.Runs(rank, 0, copied.route.local_bytes(copied.part, rank)));
}

}  // namespace

bool RegionTransfer::IsInline(bool host) const {
  if (operation_->operation().spec().lse_per_document) return false;  // may have holes
  int64_t host_bytes = 0;
  for (const std::vector<TensorCopy>* tensors : {&inputs_, &outputs_}) {
    for (const TensorCopy& copied : *tensors) {
      if (copied.writers.has_value() || copied.locations.size() != 1) return false;
      const int64_t bytes = copied.route.local_bytes(copied.part, rank_);
      if (bytes == 0) continue;
      if (!copied.on_device() && host) {
        host_bytes += bytes;
      } else if (!copied.on_device() && !copied.is_pinned()) {
        return false;
      }
      if (host_bytes > kMaxHostBytes || RunsOf(copied, rank_).size() > kMaxRuns) return false;
    }
  }
  return true;
}

absl::Status RegionTransfer::CopyInputsInline(bool host) {
  for (const TensorCopy& input : inputs_) {
    const int64_t bytes = input.route.local_bytes(input.part, rank_);
    if (bytes == 0) continue;
    if (input.released()) return absl::CancelledError("the client released the region");
    std::vector<ByteRun> runs = RunsOf(input, rank_);
    const bool pinned = !host && !input.on_device();
    if (pinned) runs = input.WithinPins(runs);
    std::vector<wire::Fragment> fragments;
    for (const ByteRun& run : runs) {
      fragments.push_back({input.AddressOf(run), static_cast<size_t>(run.bytes)});
    }
    const wire::ChunkHeader chunk{static_cast<int32_t>(input.id), 0, std::nullopt};
    constexpr auto kAtOnce = ShardOperation::Returns::kAtOnce;
    const absl::Status status = input.on_device()
                                    ? operation_->WriteImported(chunk, fragments, bytes, kAtOnce)
                                : pinned ? operation_->WritePinned(chunk, fragments, bytes, kAtOnce)
                                         : operation_->Write(chunk, fragments, bytes);
    if (!status.ok()) return status;
    received_bytes_ += bytes;
    CountIn(input, bytes);
  }
  if (!operation_->TakeUploadedNotice()) return absl::InternalError("an input is incomplete");
  return absl::OkStatus();
}

absl::Status RegionTransfer::CopyOutputInline(size_t index, bool host,
                                              std::vector<EventRef>* copies) {
  const TensorCopy& output = outputs_[index];
  const auto* from = static_cast<const uint8_t*>(output.memory.data);
  const std::vector<ByteRun> runs = RunsOf(output, rank_);
  if (output.on_device()) {
    std::vector<DeviceCopy> pieces;
    for (const ByteRun& run : runs) {
      pieces.push_back({output.AddressOf(run), from + run.local_offset, run.bytes});
    }
    absl::StatusOr<EventRef> copy = operation_->CopyToImported(pieces);
    if (!copy.ok()) return copy.status();
    copies->push_back(*std::move(copy));
    return absl::OkStatus();
  }
  if (host) {
    for (const ByteRun& run : runs) {
      std::memcpy(output.AddressOf(run), from + run.local_offset, run.bytes);
    }
    return absl::OkStatus();
  }
  for (const ByteRun& run : output.WithinPins(runs)) {
    absl::StatusOr<EventRef> copy =
        operation_->CopyToPinned(output.AddressOf(run), {from + run.local_offset, run.bytes});
    if (!copy.ok()) return copy.status();
    copies->push_back(*std::move(copy));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> RegionTransfer::CopyOutputsInline(bool host) {
  const std::vector<ShardOperation::Output> outputs = operation_->Outputs();
  std::vector<EventRef> copies;
  absl::Status status;
  size_t writing = 0;  // outputs that may be written
  while (writing < outputs_.size() && outputs_[writing].BeginWrite()) ++writing;
  const bool may_write = writing == outputs_.size();
  for (size_t i = 0; may_write && status.ok() && i < outputs_.size(); ++i) {
    outputs_[i].memory = outputs[i].memory;
    if (outputs[i].memory.bytes > 0) status = CopyOutputInline(i, host, &copies);
  }
  // After a failure too, because the other copies write until they are done.
  absl::Duration time;
  for (const EventRef& copy : copies) {
    status.Update(PollAndWait(*copy));
    if (status.ok()) time += copy->end_time() - copy->begin_time();
  }
  while (writing > 0) outputs_[--writing].EndWrite();
  if (!status.ok()) return status;
  if (!may_write) return false;
  for (const TensorCopy& output : outputs_) {
    sent_bytes_ += output.memory.bytes;
    CountOut(output, output.memory.bytes);
  }
  hooks_->on_downloaded(time);
  return true;
}

}  // namespace ringattn::worker
