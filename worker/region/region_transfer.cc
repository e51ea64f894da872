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

// Large enough that switching between transfers is negligible; small enough that an ended operation
// or a fence waits for a fraction of a millisecond.
constexpr int64_t kBlockBytes = 1 * kMiB;
// For shards with short, separate rows. Each run takes 40 bytes to describe.
constexpr int64_t kMaxRunsPerBlock = 16 * 1024;
// For direct copies: enqueuing and waiting takes 10 us, and copies run at 50 GB/s.
constexpr int64_t kDirectBlockBytes = 8 * kMiB;
constexpr int64_t kLeastDirectRun = 64 * kKiB;
// Between GPUs copies run at 380 GB/s and within one they are faster. A block takes 0.2 ms, of
// which waiting is a tenth.
constexpr int64_t kDeviceBlockBytes = 64 * kMiB;
// Runs that do not form a rectangle are enqueued one by one.
constexpr int64_t kDeviceRunsPerBlock = 2 * 1024;

// Returns the length of the shard's runs, determined at its beginning: all spans of a shard have
// one stride. At most kLeastDirectRun; 0 for an empty shard.
int64_t RunBytes(const RegionTransfer::TensorCopy& copied, int rank) {
  const int64_t bytes = std::min(copied.route.local_bytes(copied.part, rank), kLeastDirectRun);
  if (bytes == 0) return 0;
  return bytes / static_cast<int64_t>(copied.Runs(rank, 0, bytes).size());
}

// Returns the place of a client's tensor in its region.
absl::StatusOr<RegionTransfer::Location> Locate(const v1::TensorLocation& place, TensorId tensor,
                                                int64_t bytes,
                                                const RegionTransfer::FindRegion& find) {
  std::shared_ptr<Region> region = find(place.region_id());
  if (region == nullptr) {
    return absl::CancelledError(
        absl::StrCat("the region of ", TensorName(tensor), " is not attached"));
  }
  if (bytes > region->bytes() || place.offset() > static_cast<uint64_t>(region->bytes() - bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(TensorName(tensor), " is not within its region"));
  }
  uint8_t* const base = region->data() + place.offset();
  return RegionTransfer::Location{std::move(region), base, bytes, place.fence_number()};
}

absl::StatusOr<RegionTransfer::TensorCopy> LocateTensor(int rank, const ShardPlan& plan,
                                                        const AttentionSpec& spec, TensorId id,
                                                        const v1::Reserve& reserve,
                                                        const OperationWriters& writers,
                                                        const RegionTransfer::FindRegion& find) {
  const TensorId whole = ClientTensorOf(spec, id);
  TensorRoute route(spec, plan, whole);
  const auto found = std::find(route.parts().begin(), route.parts().end(), id);
  const auto part = static_cast<size_t>(found - route.parts().begin());
  RegionTransfer::TensorCopy copied{id, std::move(route), part, {}, writers.MapOf(spec, whole)};
  for (int writer = 0; writer < writers.count(); ++writer) {
    const auto place =
        std::find_if(reserve.places().begin(), reserve.places().end(), [&](const auto& place) {
          return place.tensor() == static_cast<int>(whole) &&
                 place.writer() == static_cast<uint32_t>(writer);
        });
    if (place == reserve.places().end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(TensorName(whole), " has no location in a region",
                       writers.any() ? absl::StrCat(" of writer ", writer) : ""));
    }
    const int64_t bytes =
        copied.writers.has_value() ? copied.writers->local_bytes(writer) : BytesOf(spec, whole);
    absl::StatusOr<RegionTransfer::Location> location = Locate(*place, whole, bytes, find);
    if (!location.ok()) return location.status();
    copied.locations.push_back(*std::move(location));
  }
  copied.run_bytes = RunBytes(copied, rank);
  return copied;
}

}  // namespace

bool RegionTransfer::TensorCopy::long_runs() const { return run_bytes >= kLeastDirectRun; }

int64_t RegionTransfer::TensorCopy::block_bytes() const {
  return std::clamp(run_bytes * kMaxRunsPerBlock, 4 * kKiB, kBlockBytes);
}

bool RegionTransfer::TensorCopy::IsDirect() const {
  return on_device() || (long_runs() && is_pinned());
}

bool RegionTransfer::TensorCopy::is_pinned() const {
  return std::all_of(locations.begin(), locations.end(), [](const Location& location) {
    return location.base + location.bytes <=
           location.region->data() + location.region->pinned_bytes();
  });
}

// A copy of pinned memory lies within one pin.
std::vector<ByteRun> RegionTransfer::TensorCopy::WithinPins(
    const std::vector<ByteRun>& runs) const {
  std::vector<ByteRun> pieces;
  for (const ByteRun& run : runs) {
    const Location& location = locations[run.rank];
    const int64_t place = location.base - location.region->data();
    for (int64_t done = 0; done < run.bytes;) {
      const int64_t begin = place + run.global_offset + done;
      const int64_t bytes =
          std::min(run.bytes - done, Region::kPinBytes - begin % Region::kPinBytes);
      pieces.push_back(
          {run.rank, run.global_offset + done, run.local_offset + done, bytes, run.part});
      done += bytes;
    }
  }
  return pieces;
}

std::vector<ByteRun> RegionTransfer::TensorCopy::Runs(int rank, int64_t offset,
                                                      int64_t bytes) const {
  std::vector<ByteRun> whole = route.FromLocal(part, rank, offset, bytes);
  if (!writers.has_value()) {
    for (ByteRun& run : whole) run.rank = 0;
    return whole;
  }
  std::vector<ByteRun> runs;
  for (const ByteRun& run : whole) {
    for (const ByteRun& held : writers->FromGlobal(run.global_offset, run.bytes)) {
      AppendRun(runs,
                {held.rank, held.local_offset,
                 run.local_offset + held.global_offset - run.global_offset, held.bytes, run.part});
    }
  }
  return runs;
}

std::vector<ByteRun> RegionTransfer::TensorCopy::OutputRuns(int rank, int64_t offset,
                                                            int64_t bytes) const {
  std::vector<ByteRun> runs = Runs(rank, offset, bytes);
  if (writers.has_value()) return runs;
  const size_t each = runs.size();
  for (size_t location = 1; location < locations.size(); ++location) {
    for (size_t i = 0; i < each; ++i) {
      runs.push_back(runs[i]);
      runs.back().rank = static_cast<int>(location);
    }
  }
  return runs;
}

bool RegionTransfer::TensorCopy::released() const {
  return std::any_of(locations.begin(), locations.end(),
                     [](const Location& location) { return location.region->released(); });
}

bool RegionTransfer::TensorCopy::BeginWrite() const {
  for (size_t i = 0; i < locations.size(); ++i) {
    if (locations[i].region->BeginWrite(locations[i].fence_number)) continue;
    while (i-- > 0) locations[i].region->EndWrite(locations[i].fence_number);
    return false;
  }
  return true;
}

void RegionTransfer::TensorCopy::EndWrite() const {
  for (const Location& location : locations) location.region->EndWrite(location.fence_number);
}

// For shards of short runs, the number of runs determines the time.
int64_t RegionTransfer::TensorCopy::direct_block_bytes() const {
  if (!on_device()) return kDirectBlockBytes;
  return std::clamp(run_bytes * kDeviceRunsPerBlock, block_bytes(), kDeviceBlockBytes);
}

absl::StatusOr<std::shared_ptr<RegionTransfer>> RegionTransfer::Make(
    std::shared_ptr<ShardOperation> operation, const v1::Reserve& reserve, const FindRegion& find,
    const TransferHooks* hooks, TransferThreads threads) {
  const AttentionSpec& spec = operation->operation().spec();
  const ShardPlan& plan = operation->operation().plan();
  const int rank = operation->operation().program().rank;
  const absl::StatusOr<OperationWriters> writers = OperationWriters::Read(reserve, spec);
  if (!writers.ok()) return writers.status();
  std::shared_ptr<RegionTransfer> transfer(new RegionTransfer(operation, hooks, threads));
  for (const BufferSpec& buffer : operation->operation().program().buffers) {
    if (buffer.source != BufferSource::kUpload) continue;
    absl::StatusOr<TensorCopy> input =
        LocateTensor(rank, plan, spec, *buffer.input, reserve, *writers, find);
    if (!input.ok()) return input.status();
    transfer->inputs_.push_back(*std::move(input));
  }
  for (const ShardOperation::Output& output : operation->Outputs()) {
    absl::StatusOr<TensorCopy> located =
        LocateTensor(rank, plan, spec, output.id, reserve, *writers, find);
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
    Fail(false, "the operation already has a shard stream");
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
  const auto uses = [&](const TensorCopy& copied) {
    return std::any_of(
        copied.locations.begin(), copied.locations.end(),
        [&region](const Location& location) { return location.region.get() == &region; });
  };
  if (std::any_of(inputs_.begin(), inputs_.end(), uses) ||
      std::any_of(outputs_.begin(), outputs_.end(), uses)) {
    Fail(true, "the client released a region");
  }
}

std::vector<std::shared_ptr<Region>> RegionTransfer::Regions() const {
  std::vector<std::shared_ptr<Region>> regions;
  for (const std::vector<TensorCopy>* tensors : {&inputs_, &outputs_}) {
    for (const TensorCopy& copied : *tensors) {
      for (const Location& location : copied.locations) {
        if (std::find(regions.begin(), regions.end(), location.region) != regions.end()) continue;
        regions.push_back(location.region);
      }
    }
  }
  return regions;
}

void RegionTransfer::OnOperationChanged() { AddDown(&RegionTransfer::Proceed); }

// ------------------------------------------------------------------ scheduling

void RegionTransfer::AddUp(void (RegionTransfer::*work)()) {
  work_.Add();
  threads_.up->Add([self = shared_from_this(), work] {
    (self.get()->*work)();
    self->Leave();
  });
}

void RegionTransfer::AddDown(void (RegionTransfer::*work)()) {
  work_.Add();
  threads_.down->Add([self = shared_from_this(), work] {
    (self.get()->*work)();
    self->Leave();
  });
}

// The last piece of work of an ended operation calls on_over_.
void RegionTransfer::Leave() {
  if (!work_.Leave()) return;
  std::function<void()> on_over;
  std::unique_ptr<Download> download;
  {
    absl::MutexLock lock(&mutex_);
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
    const TensorCopy& input = inputs_[next_input_.tensor];
    const int64_t left = input.route.local_bytes(input.part, rank_) - next_input_.offset;
    if (left > 0) {
      Block block = next_input_;
      block.direct = input.IsDirect();
      block.bytes = std::min(left, block.direct ? input.direct_block_bytes() : input.block_bytes());
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
    return Fail(inputs_[block->tensor].released(), std::string(status.message()));
  }
  received_bytes_ += block->bytes;
  CountIn(inputs_[block->tensor], block->bytes);
  if (operation_->TakeUploadedNotice()) return hooks_->on_uploaded(info());
  AddUp(&RegionTransfer::CopyIn);
}

void RegionTransfer::CountIn(const TensorCopy& input, int64_t bytes) {
  (input.on_device() ? hooks_->on_imported_in_bytes : hooks_->on_received_bytes)(bytes);
}

void RegionTransfer::CountOut(const TensorCopy& output, int64_t bytes) {
  (output.on_device() ? hooks_->on_imported_out_bytes : hooks_->on_sent_bytes)(bytes);
}

absl::Status RegionTransfer::CopyInput(const Block& block) {
  const TensorCopy& input = inputs_[block.tensor];
  if (input.released()) return absl::CancelledError("the client released the region");
  std::vector<ByteRun> runs = input.Runs(rank_, block.offset, block.bytes);
  if (block.direct && !input.on_device()) runs = input.WithinPins(runs);
  std::vector<wire::Fragment> fragments;
  for (const ByteRun& run : runs) {
    fragments.push_back({input.AddressOf(run), static_cast<size_t>(run.bytes)});
  }
  const wire::ChunkHeader chunk{static_cast<int32_t>(input.id), static_cast<uint64_t>(block.offset),
                                std::nullopt};
  constexpr auto kWhenRead = ShardOperation::Returns::kWhenRead;
  if (input.on_device()) {
    return operation_->WriteImported(chunk, fragments, block.bytes, kWhenRead);
  }
  return block.direct ? operation_->WritePinned(chunk, fragments, block.bytes, kWhenRead)
                      : operation_->Write(chunk, fragments, block.bytes);
}

// ---------------------------------------------------------------------- outputs

void RegionTransfer::Proceed() {
  if (Stopped() || !operation_->finished()) return;
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(downloading_, true)) return;
  }
  // Before the download, because the end of the download ends the transfer.
  for (const TensorCopy& output : outputs_) {
    if (rank_ != 0) break;
    const absl::StatusOr<bool> filled = FillHoles(output);
    if (!filled.ok()) return Fail(false, std::string(filled.status().message()));
    if (!*filled) return Fail(true, "the client released the region or fenced it");
  }
  {
    absl::MutexLock lock(&mutex_);
    const std::vector<ShardOperation::Output> outputs = operation_->Outputs();
    std::vector<DeviceRange> staged;
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs_[i].memory = outputs[i].memory;
      bytes_down_ += outputs[i].memory.bytes;
      const bool direct =
          outputs_[i].IsDirect();  // read once, because it may become true at any time
      (direct ? direct_ : staged_).push_back(i);
      if (!direct) staged.push_back(outputs[i].memory);
    }
    if (!staged.empty()) {
      download_ = operation_->BeginDownload(std::move(staged), [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->AddDown(&RegionTransfer::CopyOut);
      });
    }
  }
  for (int i = 0; i < threads_.down->size(); ++i) AddDown(&RegionTransfer::CopyOut);
}

std::optional<RegionTransfer::Block> RegionTransfer::NextDirectOutput() {
  absl::MutexLock lock(&mutex_);
  while (next_direct_.tensor < direct_.size()) {
    const size_t index = direct_[next_direct_.tensor];
    const int64_t left =
        outputs_[index].route.local_bytes(outputs_[index].part, rank_) - next_direct_.offset;
    if (left > 0) {
      const Block block{index, next_direct_.offset,
                        std::min(left, outputs_[index].direct_block_bytes()), true};
      next_direct_.offset += block.bytes;
      return block;
    }
    ++next_direct_.tensor;
    next_direct_.offset = 0;
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<EventRef>> RegionTransfer::StartDirectOutput(const Block& block) {
  const TensorCopy& output = outputs_[block.tensor];
  const auto* from = static_cast<const uint8_t*>(output.memory.data);
  std::vector<EventRef> copies;
  if (output.on_device()) {
    std::vector<DeviceCopy> pieces;
    for (const ByteRun& run : output.OutputRuns(rank_, block.offset, block.bytes)) {
      pieces.push_back({output.AddressOf(run), from + run.local_offset, run.bytes});
    }
    absl::StatusOr<EventRef> copy = operation_->CopyToImported(pieces);
    if (!copy.ok()) return copy.status();
    copies.push_back(*std::move(copy));
    return copies;
  }
  const std::vector<ByteRun> runs = output.OutputRuns(rank_, block.offset, block.bytes);
  for (const ByteRun& run : output.WithinPins(runs)) {
    absl::StatusOr<EventRef> copy =
        operation_->CopyToPinned(output.AddressOf(run), {from + run.local_offset, run.bytes});
    if (!copy.ok()) {
      // After a failure, waits for the other copies too, because they write until they are done.
      for (const EventRef& started : copies) (void)started->Wait(absl::InfiniteFuture());
      return copy.status();
    }
    copies.push_back(*std::move(copy));
  }
  return copies;
}

absl::StatusOr<bool> RegionTransfer::CopyDirectOutput(const Block& block) {
  const TensorCopy& output = outputs_[block.tensor];
  if (!output.BeginWrite()) return false;
  absl::StatusOr<std::vector<EventRef>> copies = StartDirectOutput(block);
  absl::Status status = copies.status();
  absl::Duration time;
  if (copies.ok()) {
    for (const EventRef& copy : *copies) {
      status.Update(copy->Wait(absl::InfiniteFuture()));
      if (status.ok()) time += copy->end_time() - copy->begin_time();
    }
  }
  output.EndWrite();
  if (!status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  direct_copy_time_ += time;
  return true;
}

absl::StatusOr<std::optional<Download::HostRange>> RegionTransfer::NextOutput() {
  absl::MutexLock lock(&mutex_);
  if (download_ == nullptr || download_->finished()) return std::nullopt;
  return download_->Next(kBlockBytes);
}

void RegionTransfer::CopyOut() {
  if (Stopped()) return;
  int64_t copied_bytes = 0;
  size_t output = 0;
  absl::StatusOr<bool> may_write = true;
  if (const std::optional<Block> block = NextDirectOutput(); block.has_value()) {
    may_write = CopyDirectOutput(*block);
    copied_bytes = block->bytes;
    output = block->tensor;
  } else {
    const absl::StatusOr<std::optional<Download::HostRange>> piece = NextOutput();
    if (!piece.ok()) return Fail(false, std::string(piece.status().message()));
    if (piece->has_value()) {
      output = StagedOutput((*piece)->range);
      may_write = CopyOutput(output, **piece, &copied_bytes);
    }
  }
  if (!may_write.ok()) return Fail(false, std::string(may_write.status().message()));
  if (!*may_write) return Fail(true, "the client released the region or fenced it");
  if (copied_bytes > 0) {
    sent_bytes_ += copied_bytes;
    CountOut(outputs_[output], copied_bytes);
    // Continues with the next range now, or later when the device reports it ready.
    AddDown(&RegionTransfer::CopyOut);
  }
  FinishDownload();
}

size_t RegionTransfer::StagedOutput(size_t range) {
  absl::MutexLock lock(&mutex_);
  return staged_[range];
}

bool RegionTransfer::CopyOutput(size_t index, const Download::HostRange& piece,
                                int64_t* copied_bytes) {
  const TensorCopy& output = outputs_[index];
  int64_t& done = *copied_bytes;
  while (done < piece.bytes) {
    if (Stopped()) return true;
    const int64_t bytes = std::min(piece.bytes - done, output.block_bytes());
    if (!output.BeginWrite()) return false;
    for (const ByteRun& run : output.OutputRuns(rank_, piece.offset + done, bytes)) {
      std::memcpy(output.AddressOf(run), piece.data + run.local_offset - piece.offset, run.bytes);
    }
    output.EndWrite();
    done += bytes;
  }
  return true;
}

// Writes the rows of the client's tensor that no worker owns: -inf in fp32 (lse per document).
absl::StatusOr<bool> RegionTransfer::FillHoles(const TensorCopy& output) {
  constexpr float kHole = -std::numeric_limits<float>::infinity();
  std::vector<float> holes;  // source of copies to device memory
  absl::StatusOr<bool> filled = true;
  output.route.ForEachHole([&](int64_t offset, int64_t bytes) {
    for (int64_t done = 0; filled.ok() && *filled && done < bytes; done += kBlockBytes) {
      if (Stopped()) return;
      if (!output.BeginWrite()) {
        filled = false;
        return;
      }
      const int64_t end = std::min(bytes, done + kBlockBytes);
      if (output.on_device()) {
        holes.assign((end - done) / sizeof(kHole), kHole);
        const absl::Status status = operation_->CopyFromHost(
            output.locations[0].base + offset + done, holes.data(), end - done);
        if (!status.ok()) filled = status;
      } else {
        for (int64_t at = done; at < end; at += sizeof(kHole)) {
          std::memcpy(output.locations[0].base + offset + at, &kHole, sizeof(kHole));
        }
      }
      output.EndWrite();
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
    copy_time = direct_copy_time_;
    if (download_ != nullptr) copy_time += download_->copy_time();
  }
  hooks_->on_downloaded(copy_time);
  hooks_->on_delivered(info());
}

}  // namespace ringattn::worker
