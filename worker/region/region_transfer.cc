#include "worker/region/region_transfer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/wire/chunk_codec.h"

namespace ringattn::worker {
namespace {

// Large enough that taking turns costs nothing beside the copy, small enough that an operation
// that has ended, or a fence, waits for a fraction of a millisecond.
constexpr int64_t kBlockBytes = 1 * kMiB;
// Of a shard with short rows apart from one another: a run of bytes takes 32 bytes to say.
constexpr int64_t kMaxRunsPerBlock = 16 * 1024;

int64_t BlockBytes(const TensorLayout& layout) {
  return std::clamp(layout.inner_bytes * kMaxRunsPerBlock, 4 * kKiB, kBlockBytes);
}

absl::StatusOr<RegionTransfer::Copied> Locate(const ShardOperation& operation,
                                              const ShardPlan& plan, const AttentionSpec& spec,
                                              TensorId id, const v1::Reserve& reserve,
                                              const RegionTransfer::FindRegion& find) {
  const TensorId whole = ClientTensorOf(spec, id);
  const auto place = std::find_if(
      reserve.places().begin(), reserve.places().end(),
      [whole](const auto& place) { return place.tensor() == static_cast<int>(whole); });
  if (place == reserve.places().end()) {
    return absl::InvalidArgumentError(absl::StrCat(TensorName(whole), " has no place"));
  }
  std::shared_ptr<Region> region = find(place->region_id());
  if (region == nullptr) {
    return absl::CancelledError(absl::StrCat("the region of ", TensorName(whole), " is not here"));
  }
  const int64_t bytes = BytesOf(spec, whole);
  if (bytes > region->bytes() || place->offset() > static_cast<uint64_t>(region->bytes() - bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(TensorName(whole), " lies outside its region"));
  }
  uint8_t* const base = region->data() + place->offset();
  TensorRoute route(spec, plan, whole);
  const auto part = std::find(route.parts().begin(), route.parts().end(), id);
  const auto index = static_cast<size_t>(part - route.parts().begin());
  return RegionTransfer::Copied{
      id, std::move(route), index, std::move(region), base, BlockBytes(LayoutOf(spec, id))};
}

}  // namespace

absl::StatusOr<std::shared_ptr<RegionTransfer>> RegionTransfer::Make(
    std::shared_ptr<ShardOperation> operation, const v1::Reserve& reserve, int rank,
    const FindRegion& find, const TransferHooks* hooks, TransferThreads threads) {
  const AttentionSpec& spec = operation->operation().spec();
  const ShardPlan& plan = operation->operation().plan();
  std::shared_ptr<RegionTransfer> transfer(
      new RegionTransfer(operation, rank, reserve.fence_number(), hooks, threads));
  for (const BufferSpec& buffer : operation->operation().program().buffers) {
    if (buffer.source != BufferSource::kUpload) continue;
    absl::StatusOr<Copied> input = Locate(*operation, plan, spec, *buffer.input, reserve, find);
    if (!input.ok()) return input.status();
    transfer->inputs_.push_back(*std::move(input));
  }
  for (const ShardOperation::Output& output : operation->Outputs()) {
    absl::StatusOr<Copied> located = Locate(*operation, plan, spec, output.id, reserve, find);
    if (!located.ok()) return located.status();
    transfer->outputs_.push_back(*std::move(located));
  }
  return transfer;
}

void RegionTransfer::Start(std::function<void()> on_over) {
  {
    absl::MutexLock lock(&mutex_);
    on_over_ = std::move(on_over);
  }
  if (!operation_->SetListener(this)) {
    Fail(false, "the operation has a shard stream");
    std::function<void()> over;
    {
      absl::MutexLock lock(&mutex_);
      over = std::exchange(on_over_, nullptr);
    }
    return over();
  }
  for (int i = 0; i < threads_.up->size(); ++i) AddUp(&RegionTransfer::CopyIn);
  OnOperationChanged();
}

void RegionTransfer::OnRegionGone(const Region& region) {
  const auto uses = [&](const Copied& copied) { return copied.region.get() == &region; };
  if (std::any_of(inputs_.begin(), inputs_.end(), uses) ||
      std::any_of(outputs_.begin(), outputs_.end(), uses)) {
    Fail(true, "the client released a region");
  }
}

void RegionTransfer::OnOperationChanged() { AddDown(&RegionTransfer::Proceed); }

// ------------------------------------------------------------------ taking turns

void RegionTransfer::AddUp(void (RegionTransfer::*work)()) {
  {
    absl::MutexLock lock(&mutex_);
    ++working_;
  }
  threads_.up->Add([self = shared_from_this(), work] {
    (self.get()->*work)();
    self->Leave();
  });
}

void RegionTransfer::AddDown(void (RegionTransfer::*work)()) {
  {
    absl::MutexLock lock(&mutex_);
    ++working_;
  }
  threads_.down->Add([self = shared_from_this(), work] {
    (self.get()->*work)();
    self->Leave();
  });
}

// The last to leave an operation that has ended puts the light out.
void RegionTransfer::Leave() {
  const bool ended = !operation_->ended().ok();
  std::function<void()> on_over;
  std::unique_ptr<Download> download;
  {
    absl::MutexLock lock(&mutex_);
    if (--working_ > 0 || !ended || over_) return;
    over_ = true;
    on_over = std::exchange(on_over_, nullptr);
    download = std::move(download_);
  }
  operation_->RemoveListener();
  download.reset();
  on_over();
}

void RegionTransfer::Fail(bool released, const std::string& why) {
  if (failed_.exchange(true)) return;
  if (operation_->ended().ok()) hooks_->on_failed(info(), released, why);
}

// ----------------------------------------------------------------------- inputs

std::optional<RegionTransfer::Block> RegionTransfer::NextInput() {
  absl::MutexLock lock(&mutex_);
  while (next_input_.tensor < inputs_.size()) {
    const Copied& input = inputs_[next_input_.tensor];
    const int64_t left = input.route.local_bytes(input.part, rank_) - next_input_.offset;
    if (left > 0) {
      Block block = next_input_;
      block.bytes = std::min(left, input.block_bytes);
      next_input_.offset += block.bytes;
      return block;
    }
    ++next_input_.tensor;
    next_input_.offset = 0;
  }
  return std::nullopt;
}

void RegionTransfer::CopyIn() {
  if (Stopped()) return;
  const std::optional<Block> block = NextInput();
  if (!block.has_value()) return;
  if (absl::Status status = CopyInput(*block); !status.ok()) {
    return Fail(inputs_[block->tensor].region->released(), std::string(status.message()));
  }
  received_bytes_ += block->bytes;
  hooks_->on_received_bytes(block->bytes);
  if (operation_->TakeUploadedNotice()) return hooks_->on_uploaded(info());
  AddUp(&RegionTransfer::CopyIn);
}

absl::Status RegionTransfer::CopyInput(const Block& block) {
  const Copied& input = inputs_[block.tensor];
  if (input.region->released()) return absl::CancelledError("the client released the region");
  std::vector<wire::Fragment> fragments;
  for (const ByteRun& run : input.route.FromLocal(input.part, rank_, block.offset, block.bytes)) {
    fragments.push_back({input.base + run.global_offset, static_cast<size_t>(run.bytes)});
  }
  return operation_->Write(
      {static_cast<int32_t>(input.id), static_cast<uint64_t>(block.offset), std::nullopt},
      fragments, block.bytes);
}

// ---------------------------------------------------------------------- outputs

void RegionTransfer::Proceed() {
  if (Stopped() || !operation_->finished()) return;
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(downloading_, true)) return;
  }
  // Before the download, whose end is the transfer's.
  for (const Copied& output : outputs_) {
    if (rank_ == 0 && !FillHoles(output)) {
      return Fail(true, "the client released the region or fenced it");
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    for (const ShardOperation::Output& output : operation_->Outputs()) {
      bytes_down_ += output.memory.bytes;
    }
    download_ = operation_->BeginDownload(operation_->Outputs(), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->AddDown(&RegionTransfer::CopyOut);
    });
  }
  for (int i = 0; i < threads_.down->size(); ++i) AddDown(&RegionTransfer::CopyOut);
}

absl::StatusOr<std::optional<Download::HostRange>> RegionTransfer::NextOutput() {
  absl::MutexLock lock(&mutex_);
  if (download_ == nullptr || download_->finished()) return std::nullopt;
  return download_->Next(kBlockBytes);
}

void RegionTransfer::CopyOut() {
  if (Stopped()) return;
  const absl::StatusOr<std::optional<Download::HostRange>> piece = NextOutput();
  if (!piece.ok()) return Fail(false, std::string(piece.status().message()));
  if (piece->has_value()) {
    if (!CopyOutput(**piece)) return Fail(true, "the client released the region or fenced it");
    sent_bytes_ += (*piece)->bytes;
    hooks_->on_sent_bytes((*piece)->bytes);
    // What comes next, or later with the device's notice.
    AddDown(&RegionTransfer::CopyOut);
  }
  FinishDownload();
}

bool RegionTransfer::CopyOutput(const Download::HostRange& piece) {
  const Copied& output = outputs_[piece.range];
  int64_t done = 0;
  while (done < piece.bytes) {
    if (Stopped()) return true;
    const int64_t bytes = std::min(piece.bytes - done, output.block_bytes);
    if (!output.region->BeginWrite(fence_number_)) return false;
    const uint8_t* from = piece.data + done;
    for (const ByteRun& run :
         output.route.FromLocal(output.part, rank_, piece.offset + done, bytes)) {
      std::memcpy(output.base + run.global_offset, from, run.bytes);
      from += run.bytes;
    }
    output.region->EndWrite(fence_number_);
    done += bytes;
  }
  return true;
}

// Bytes of the client's tensor that no worker has: fp32 -inf (lse per document).
bool RegionTransfer::FillHoles(const Copied& output) {
  bool filled = true;
  output.route.ForEachHole([&](int64_t offset, int64_t bytes) {
    for (int64_t done = 0; filled && done < bytes; done += kBlockBytes) {
      if (Stopped()) return;
      if (!output.region->BeginWrite(fence_number_)) {
        filled = false;
        return;
      }
      constexpr float kHole = -std::numeric_limits<float>::infinity();
      const int64_t end = std::min(bytes, done + kBlockBytes);
      for (int64_t at = done; at < end; at += sizeof(kHole)) {
        std::memcpy(output.base + offset + at, &kHole, sizeof(kHole));
      }
      output.region->EndWrite(fence_number_);
    }
  });
  return filled;
}

void RegionTransfer::FinishDownload() {
  absl::Duration copy_time;
  {
    absl::MutexLock lock(&mutex_);
    if (delivered_ || sent_bytes_.load() < bytes_down_ || Stopped()) return;
    delivered_ = true;
    copy_time = download_->copy_time();
  }
  hooks_->on_downloaded(copy_time);
  hooks_->on_delivered(info());
}

}  // namespace ringattn::worker
