#include "worker/operation/shard_operation.h"

#include <algorithm>
#include <cassert>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/layout/tensor_route.h"
#include "common/wire/crc32c.h"

namespace ringattn::worker {
namespace {

absl::Status WrongPlace(TensorId id, uint64_t offset, uint64_t bytes, const ByteRangeSet& arrived,
                        ByteRangeSet::Added added) {
  const std::string place = absl::StrCat(TensorName(id), ": ", bytes, " bytes at ", offset, " ");
  switch (added) {
    case ByteRangeSet::Added::kOutside:
      return absl::InvalidArgumentError(
          absl::StrCat(place, "exceed the shard's size of ", arrived.size_bytes()));
    case ByteRangeSet::Added::kOverlaps:
      return absl::InvalidArgumentError(absl::StrCat(place, "overlap bytes that were sent before"));
    case ByteRangeSet::Added::kTooManyRanges:
    case ByteRangeSet::Added::kNew:
      break;
  }
  return absl::ResourceExhaustedError(absl::StrCat(place, "create too many separate ranges"));
}

// Returns the map of the operation's packed input, if it has one.
std::optional<PackedInput> PackedOf(const Operation& operation) {
  std::set<TensorId> uploads;
  for (const BufferSpec& buffer : operation.program().buffers) {
    if (buffer.source == BufferSource::kUpload) uploads.insert(*buffer.input);
  }
  for (TensorId upload : uploads) {
    const TensorId id = ClientTensorOf(operation.spec(), upload);
    const std::vector<TensorId> parts = PartsOf(id);
    if (parts.size() == 1 || !IsCutAsOne(operation.plan(), id)) continue;
    const bool all = std::all_of(parts.begin(), parts.end(),
                                 [&](TensorId part) { return uploads.count(part) > 0; });
    const int64_t part_bytes = LayoutOf(operation.spec(), parts[0]).inner_bytes;
    if (all && part_bytes > 0) return PackedInput(id, parts, part_bytes);
  }
  return std::nullopt;
}

}  // namespace

ShardOperation::ShardOperation(OperationInfo info, PreparedOperation prepared, Device* device,
                               DestroyedCallback on_destroyed)
    : info_(std::move(info)),
      device_(device),
      reserved_time_(MonotonicNow()),
      operation_(std::move(prepared.operation)),
      packed_(PackedOf(*operation_)),
      reservation_(std::move(prepared.reservation)),
      on_destroyed_(std::move(on_destroyed)) {
  for (const BufferSpec& buffer : operation_->program().buffers) {
    if (buffer.source != BufferSource::kUpload) continue;
    inputs_[*buffer.input] = {operation_->InputBuffer(*buffer.input),
                              ByteRangeSet(operation_->ShardBytes(*buffer.input))};
  }
}

ShardOperation::~ShardOperation() {
  // The memory is returned only when nothing writes to it: chunks of an operation that ended early
  // may still be in flight. The teardown's watchdog handles a copy that hangs.
  bool ended_well = finished_;
  for (const EventRef& upload : uploads_) ended_well &= upload->Wait(absl::InfiniteFuture()).ok();
  on_destroyed_({std::move(reservation_), std::move(operation_)}, ended_well);
}

absl::Status ShardOperation::Write(const wire::ChunkHeader& chunk,
                                   absl::Span<const wire::Fragment> payload,
                                   uint64_t payload_bytes) {
  return WriteFrom(Source::kAnyMemory, Returns::kAtOnce, chunk, payload, payload_bytes);
}

absl::Status ShardOperation::WriteSmall(const wire::ChunkHeader& chunk,
                                        absl::Span<const wire::Fragment> payload,
                                        uint64_t payload_bytes) {
  return WriteFrom(Source::kSmall, Returns::kAtOnce, chunk, payload, payload_bytes);
}

absl::Status ShardOperation::WritePinned(const wire::ChunkHeader& chunk,
                                         absl::Span<const wire::Fragment> payload,
                                         uint64_t payload_bytes, Returns returns) {
  return WriteFrom(Source::kPinned, returns, chunk, payload, payload_bytes);
}

absl::Status ShardOperation::WriteImported(const wire::ChunkHeader& chunk,
                                           absl::Span<const wire::Fragment> payload,
                                           uint64_t payload_bytes, Returns returns) {
  return WriteFrom(Source::kImported, returns, chunk, payload, payload_bytes);
}

absl::Status ShardOperation::WriteFrom(Source source, Returns returns,
                                       const wire::ChunkHeader& chunk,
                                       absl::Span<const wire::Fragment> payload,
                                       uint64_t payload_bytes) {
  Targets targets;
  if (absl::Status status = Cover(chunk, payload_bytes, &targets); !status.ok()) return status;
  // Without the lock: Cover assigns each range to one writer only.
  absl::Status status = Copy(source, returns, chunk, payload, targets);
  absl::MutexLock lock(&mutex_);
  --copying_;
  uploaded_time_ = MonotonicNow();
  return status;
}

absl::Status ShardOperation::Cover(const wire::ChunkHeader& chunk, uint64_t payload_bytes,
                                   Targets* targets) {
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  if (IsPacked(chunk)) return CoverPacked(chunk, payload_bytes, targets);
  const auto id = static_cast<TensorId>(chunk.tensor);
  if (chunk.tensor < 1 || chunk.tensor > 255 || inputs_.count(id) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", chunk.tensor, " is not an input of this operation"));
  }
  if (absl::Status status = CoverInput(id, chunk.offset, payload_bytes, targets); !status.ok()) {
    return status;
  }
  ++copying_;
  return absl::OkStatus();
}

absl::Status ShardOperation::CoverInput(TensorId id, uint64_t offset, uint64_t bytes,
                                        Targets* targets) {
  Input& input = inputs_.at(id);
  const ByteRangeSet::Added added = input.arrived.Add(offset, bytes);
  if (added != ByteRangeSet::Added::kNew) {
    return WrongPlace(id, offset, bytes, input.arrived, added);
  }
  targets->push_back(
      {static_cast<uint8_t*>(input.buffer->data()) + offset, static_cast<int64_t>(bytes)});
  return absl::OkStatus();
}

absl::Status ShardOperation::CoverPacked(const wire::ChunkHeader& chunk, uint64_t payload_bytes,
                                         Targets* targets) {
  const std::vector<TensorId>& parts = packed_->parts();
  const uint64_t size = parts.size() * inputs_.at(parts[0]).arrived.size_bytes();
  if (chunk.offset > size || payload_bytes > size - chunk.offset) {
    return absl::InvalidArgumentError(absl::StrCat(TensorName(packed_->id()), ": ", payload_bytes,
                                                   " bytes at ", chunk.offset,
                                                   " exceed the shard's size of ", size));
  }
  // Counted even if a later part is rejected. The ranges already marked as arrived then never fill,
  // so the inputs never become complete.
  ++copying_;
  for (size_t part = 0; part < parts.size(); ++part) {
    const PackedInput::Range range = packed_->RangeOf(part, static_cast<int64_t>(chunk.offset),
                                                      static_cast<int64_t>(payload_bytes));
    absl::Status status = CoverInput(parts[part], range.begin, range.bytes, targets);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<EventRef>> ShardOperation::Upload(
    Source source, absl::Span<const wire::Fragment> payload, const UploadTarget& target,
    uint32_t* crc) {
  if (source == Source::kImported) {
    std::vector<DeviceCopy> pieces;
    auto* to = static_cast<uint8_t*>(target.data);
    for (const wire::Fragment& fragment : payload) {
      const auto bytes = static_cast<int64_t>(fragment.size);
      pieces.push_back({to, fragment.data, bytes});
      to += bytes;
    }
    absl::StatusOr<EventRef> copy = device_->CopyImported(pieces, ImportedCopy::kIn);
    if (!copy.ok()) return copy.status();
    return std::vector<EventRef>{*std::move(copy)};
  }
  absl::StatusOr<std::unique_ptr<worker::Upload>> upload = BeginUpload(source, {target});
  if (!upload.ok()) return upload.status();
  for (const wire::Fragment& fragment : payload) {
    if (crc != nullptr) *crc = wire::ExtendCrc32c(*crc, fragment.data, fragment.size);
    absl::Status status = source == Source::kPinned
                              ? (*upload)->AppendPinned(fragment.data, fragment.size)
                              : (*upload)->Append(fragment.data, fragment.size);
    if (!status.ok()) return status;
  }
  return (*upload)->Finish();
}

absl::StatusOr<std::unique_ptr<Upload>> ShardOperation::BeginUpload(Source source,
                                                                    Targets targets) {
  if (source == Source::kSmall) return MakeSmallUpload(device_, std::move(targets));
  return device_->BeginUpload(std::move(targets));
}

// Uploads one part after another within a single Upload, because the fixed cost is per chunk.
absl::StatusOr<std::vector<EventRef>> ShardOperation::UploadPacked(
    Source source, const wire::ChunkHeader& chunk, absl::Span<const wire::Fragment> payload,
    const Targets& targets) {
  absl::StatusOr<std::unique_ptr<worker::Upload>> upload = BeginUpload(source, targets);
  if (!upload.ok()) return upload.status();
  for (size_t part = 0; part < targets.size(); ++part) {
    absl::Status status = packed_->ForEachRun(
        part, static_cast<int64_t>(chunk.offset), payload,
        [&](const uint8_t* data, int64_t bytes) { return (*upload)->Append(data, bytes); });
    if (!status.ok()) return status;
  }
  return (*upload)->Finish();
}

absl::Status ShardOperation::Copy(Source source, Returns returns, const wire::ChunkHeader& chunk,
                                  absl::Span<const wire::Fragment> payload,
                                  const Targets& targets) {
  uint32_t crc = 0;
  const bool packed = IsPacked(chunk);
  assert(!packed || source == Source::kAnyMemory || source == Source::kSmall);
  if (packed && chunk.crc32c.has_value()) crc = wire::Crc32c(payload);
  absl::StatusOr<std::vector<EventRef>> events =
      packed ? UploadPacked(source, chunk, payload, targets)
             : Upload(source, payload, targets[0], chunk.crc32c.has_value() ? &crc : nullptr);
  if (!events.ok()) return events.status();
  if (returns == Returns::kWhenRead) {
    for (const EventRef& event : *events) {
      // The teardown's watchdog handles a copy that hangs.
      absl::Status status = event->Wait(absl::InfiniteFuture());
      if (!status.ok()) return status;
    }
  }
  if (!events->empty()) {
    absl::MutexLock lock(&mutex_);
    ForgetDoneUploads();
    uploads_.insert(uploads_.end(), events->begin(), events->end());
  }
  if (chunk.crc32c.has_value() && *chunk.crc32c != crc) {
    return absl::InvalidArgumentError(absl::StrCat(TensorName(static_cast<TensorId>(chunk.tensor)),
                                                   ": crc32c of the chunk at ", chunk.offset,
                                                   " does not match its bytes"));
  }
  return absl::OkStatus();
}

void ShardOperation::ForgetDoneUploads() const {
  const auto done = [this](const EventRef& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // A failed upload stays, so that the program fails with it.
    if (!event->Done() || !event->Wait(absl::InfinitePast()).ok()) return false;
    upload_copies_.begin = std::min(upload_copies_.begin, event->begin_time());
    upload_copies_.end = std::max(upload_copies_.end, event->end_time());
    upload_copies_.total += event->end_time() - event->begin_time();
    return true;
  };
  uploads_.erase(std::remove_if(uploads_.begin(), uploads_.end(), done), uploads_.end());
}

std::vector<EventRef> ShardOperation::PendingUploads() const {
  absl::MutexLock lock(&mutex_);
  ForgetDoneUploads();
  return uploads_;
}

ShardOperation::CopyTimes ShardOperation::upload_copies() const {
  absl::MutexLock lock(&mutex_);
  ForgetDoneUploads();
  return upload_copies_;
}

bool ShardOperation::InputsComplete() const {
  absl::MutexLock lock(&mutex_);
  return copying_ == 0 && std::all_of(inputs_.begin(), inputs_.end(), [](const auto& input) {
           return input.second.arrived.complete();
         });
}

bool ShardOperation::TakeUploadedNotice() {
  if (!InputsComplete()) return false;
  absl::MutexLock lock(&mutex_);
  return !std::exchange(uploaded_noticed_, true);
}

absl::Time ShardOperation::uploaded_time() const {
  absl::MutexLock lock(&mutex_);
  return uploaded_time_;
}

std::vector<ShardOperation::Output> ShardOperation::Outputs() const {
  std::vector<Output> outputs;
  for (const BufferSpec& buffer : operation_->program().buffers) {
    if (!buffer.output.has_value()) continue;
    const DeviceBuffer* memory = operation_->OutputBuffer(*buffer.output);
    outputs.push_back(
        {*buffer.output,
         {const_cast<DeviceBuffer*>(memory)->data(), operation_->ShardBytes(*buffer.output)}});
  }
  std::sort(outputs.begin(), outputs.end(),
            [](const Output& a, const Output& b) { return a.id < b.id; });
  return outputs;
}

std::vector<ShardOperation::Output> ShardOperation::StreamedOutputs() const {
  std::map<TensorId, DeviceRange> memory;
  std::set<TensorId> tensors;  // as clients name them
  for (const Output& output : Outputs()) {
    memory[output.id] = output.memory;
    tensors.insert(ClientTensorOf(operation_->spec(), output.id));
  }
  std::vector<Output> streamed;
  for (TensorId tensor : tensors) {
    const TensorRoute route(operation_->spec(), operation_->plan(), tensor);
    for (const LocalRange& range : route.StreamOrder(operation_->program().rank)) {
      const TensorId part = route.parts()[range.part];
      const auto* data = static_cast<const uint8_t*>(memory.at(part).data) + range.offset;
      streamed.push_back({part, {data, range.bytes}, range.offset});
    }
  }
  return streamed;
}

absl::StatusOr<EventRef> ShardOperation::CopyToPinned(void* pinned, DeviceRange part) const {
  return device_->CopyToPinned(pinned, part.data, part.bytes);
}

absl::StatusOr<EventRef> ShardOperation::CopyToImported(absl::Span<const DeviceCopy> pieces) const {
  return device_->CopyImported(pieces, ImportedCopy::kOut);
}

absl::Status ShardOperation::CopyFromHost(void* device, const void* host, int64_t bytes) const {
  return device_->CopyFromHost(device, host, bytes);
}

absl::Status ShardOperation::CopyAllToHost(absl::Span<const DeviceCopy> copies) const {
  return device_->CopyAllToHost(copies);
}

std::unique_ptr<Download> ShardOperation::BeginDownload(const std::vector<Output>& outputs,
                                                        std::function<void()> on_ready) const {
  std::vector<DeviceRange> ranges;
  for (const Output& output : outputs) ranges.push_back(output.memory);
  return BeginDownload(std::move(ranges), std::move(on_ready));
}

std::unique_ptr<Download> ShardOperation::BeginDownload(std::vector<DeviceRange> ranges,
                                                        std::function<void()> on_ready) const {
  return device_->BeginDownload(std::move(ranges), std::move(on_ready));
}

std::shared_ptr<const Residual> ShardOperation::TakeResidual() {
  if (!finished() || !ended().ok()) return nullptr;
  for (const EventRef& upload : PendingUploads()) {
    if (!upload->Wait(absl::InfiniteFuture()).ok()) return nullptr;
  }
  return MakeResidual(*operation_, reservation_);
}

void ShardOperation::SetFinished() {
  {
    absl::MutexLock lock(&mutex_);
    finished_ = true;
  }
  Notify();
}

void ShardOperation::End(absl::Status why) {
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) return;
    ended_ = std::move(why);
  }
  operation_->control().stop.store(true);
  Notify();
}

bool ShardOperation::finished() const {
  absl::MutexLock lock(&mutex_);
  return finished_;
}

absl::Status ShardOperation::ended() const {
  absl::MutexLock lock(&mutex_);
  return ended_;
}

bool ShardOperation::SetListener(OperationListener* listener) {
  absl::MutexLock lock(&listener_mutex_);
  if (listener_ != nullptr) return false;
  listener_ = listener;
  return true;
}

void ShardOperation::RemoveListener() {
  absl::MutexLock lock(&listener_mutex_);
  listener_ = nullptr;
}

void ShardOperation::Notify() {
  absl::MutexLock lock(&listener_mutex_);
  if (listener_ != nullptr) listener_->OnOperationChanged();
}

}  // namespace ringattn::worker
