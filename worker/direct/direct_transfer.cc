#include "worker/direct/direct_transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/security/secret.h"

namespace ringattn::worker {
namespace {

// A message costs about as much as this many more bytes.
constexpr int64_t kSkippedBytes = 16 << 10;
// The most ranges of one output for one client. Each is a message.
constexpr size_t kMostRanges = 16 << 10;

// Returns where a part begins, aligned to a cache line so that parts do not share one.
int64_t PartBegin(int64_t bytes, uint32_t part, uint32_t parts) {
  if (part == parts) return bytes;
  return bytes / parts * part / 64 * 64;
}

}  // namespace

// The lease of one stream.
class DirectTransfer::Lease final : public ShardLease {
 public:
  Lease(std::shared_ptr<DirectTransfer> transfer, std::shared_ptr<ShardOperation> operation,
        OperationListener* listener, std::shared_ptr<const std::vector<Ranges>> ranges,
        const v1::OpenShard& open)
      : transfer_(std::move(transfer)),
        operation_(std::move(operation)),
        listener_(listener),
        ranges_(std::move(ranges)),
        part_(open.part()),
        parts_(std::max(1u, open.parts())) {}
  ~Lease() override { transfer_->Leave(listener_, delivered_.load()); }

  const std::shared_ptr<ShardOperation>& operation() const override { return operation_; }

  std::vector<OutputRange> Outputs() const override {
    std::vector<OutputRange> outputs;
    const std::vector<ShardOperation::Output> shard = operation_->Outputs();
    for (size_t i = 0; i < shard.size(); ++i) {
      const ShardOperation::Output& output = shard[i];
      for (const WriterRange& range : (*ranges_)[i]) {
        const int64_t bytes = range.end - range.begin;
        const int64_t begin = range.begin + PartBegin(bytes, part_, parts_);
        const int64_t end = range.begin + PartBegin(bytes, part_ + 1, parts_);
        outputs.push_back({output.id,
                           begin,
                           {static_cast<const uint8_t*>(output.memory.data) + begin, end - begin}});
      }
    }
    return outputs;
  }

  void OnChunk() override {
    absl::MutexLock lock(&transfer_->mutex_);
    ++transfer_->counts_.chunks;
  }
  void OnChunkTaken(int64_t bytes, const absl::Status& status) override {
    {
      absl::MutexLock lock(&transfer_->mutex_);
      --transfer_->counts_.chunks;
      if (status.ok()) transfer_->counts_.received_bytes += bytes;
    }
    if (status.ok()) return;
    const bool is_wrong = absl::IsInvalidArgument(status) || absl::IsResourceExhausted(status);
    transfer_->Fail(is_wrong, std::string(status.message()));
  }
  // Other streams may still bring inputs.
  absl::Status OnInputsEnd() override {
    if (operation_->InputsComplete()) return absl::OkStatus();
    return absl::AbortedError("the stream ended before all inputs arrived");
  }
  void OnSend() override {
    absl::MutexLock lock(&transfer_->mutex_);
    ++transfer_->counts_.sends;
  }
  void OnSent(int64_t bytes) override {
    absl::MutexLock lock(&transfer_->mutex_);
    --transfer_->counts_.sends;
    transfer_->counts_.sent_bytes += bytes;
  }
  void OnDone() override {
    if (!delivered_.exchange(true)) transfer_->OnDelivered();
  }

 private:
  const std::shared_ptr<DirectTransfer> transfer_;
  const std::shared_ptr<ShardOperation> operation_;
  OperationListener* const listener_;
  const std::shared_ptr<const std::vector<Ranges>> ranges_;
  const uint32_t part_;
  const uint32_t parts_;
  std::atomic<bool> delivered_{false};
};

DirectTransfer::DirectTransfer(const std::shared_ptr<ShardOperation>& operation, std::string token,
                               OperationWriters writers, const DirectHooks* hooks)
    : info_(operation->info()),
      operation_(operation),
      token_(std::move(token)),
      writers_(std::move(writers)),
      hooks_(hooks) {
  counts_.opened.resize(writers_.count());
  ranges_.resize(writers_.count());
}

DirectTransfer::~DirectTransfer() {
  if (const auto operation = operation_.lock()) operation->RemoveListener();
}

bool DirectTransfer::Start() {
  const auto operation = operation_.lock();
  return operation != nullptr && operation->SetListener(this);
}

void DirectTransfer::Forget() {
  absl::MutexLock lock(&mutex_);
  counts_.forgotten = true;
}

absl::Status DirectTransfer::Refusal() {
  return absl::UnauthenticatedError("the token is not valid for a stream of this worker");
}

absl::Status DirectTransfer::Admit(const v1::OpenShard& open) {
  const bool is_right = open.token().size() == token_.size() && SecretsEqual(open.token(), token_);
  const uint32_t parts = std::max(1u, open.parts());
  absl::MutexLock lock(&mutex_);
  if (!is_right || counts_.forgotten) return Refusal();
  const Limits limits;
  // The coordinator applies the same bounds to its replies. Single-byte chunks would turn a
  // gigabyte into as many messages.
  const int64_t chunk_bytes = open.max_chunk_bytes();
  if (chunk_bytes != 0 &&
      (chunk_bytes < limits.min_chunk_bytes_down || chunk_bytes > limits.max_chunk_bytes_up)) {
    return absl::InvalidArgumentError(absl::StrCat("max_chunk_bytes is ", chunk_bytes,
                                                   "; it must be in ", limits.min_chunk_bytes_down,
                                                   "..", limits.max_chunk_bytes_up));
  }
  const uint32_t most = static_cast<uint32_t>(limits.max_streams_per_ticket);
  if (parts > most || open.part() >= parts) {
    return absl::InvalidArgumentError(absl::StrCat(
        "part ", open.part(), " of ", parts, ": parts must be in 1..", most, " and part below it"));
  }
  if (open.writer() >= counts_.opened.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("writer is ", open.writer(), "; the request has ", counts_.opened.size()));
  }
  Opened& opened = counts_.opened[open.writer()];
  if (opened.empty()) opened.resize(parts);
  if (opened.size() != parts || opened[open.part()]) return Refusal();
  opened[open.part()] = true;
  ++counts_.open;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ShardLease>> DirectTransfer::Open(const v1::OpenShard& open,
                                                                 OperationListener* listener) {
  if (absl::Status status = Admit(open); !status.ok()) return status;
  const auto operation = operation_.lock();
  if (operation == nullptr) return Refusal();
  {
    absl::MutexLock lock(&listeners_mutex_);
    listeners_.insert(listener);
  }
  return std::make_unique<Lease>(shared_from_this(), operation, listener,
                                 RangesFor(open.writer(), *operation), open);
}

TransferCounts DirectTransfer::progress() const {
  const auto operation = operation_.lock();
  const bool complete = operation == nullptr || operation->InputsComplete();
  const bool finished = operation != nullptr && operation->finished();
  absl::MutexLock lock(&mutex_);
  TransferCounts progress{counts_.received_bytes, counts_.sent_bytes, false};
  if (!complete) {
    progress.waits_for_client = counts_.chunks == 0;
  } else if (finished) {
    progress.waits_for_client = !AllOpened() || counts_.sends > 0;
  }
  return progress;
}

std::shared_ptr<const std::vector<DirectTransfer::Ranges>> DirectTransfer::RangesFor(
    uint32_t writer, ShardOperation& operation) {
  absl::MutexLock lock(&ranges_mutex_);
  if (ranges_[writer] != nullptr) return ranges_[writer];
  const AttentionSpec& spec = operation.operation().spec();
  const int rank = operation.operation().program().rank;
  std::vector<Ranges> all;
  for (const ShardOperation::Output& output : operation.Outputs()) {
    const std::optional<ShardMap> writers = writers_.MapOf(spec, output.id);
    Ranges& ranges = all.emplace_back();
    if (writers.has_value()) {
      const ShardMap shards(spec, operation.operation().plan(), output.id);
      int64_t skipped_bytes = kSkippedBytes;
      do {
        ranges = RangesOfWriter(shards, rank, *writers, static_cast<int>(writer), skipped_bytes);
        skipped_bytes *= 4;
      } while (ranges.size() > kMostRanges);
      if (ranges.empty()) ranges.emplace_back();
    } else {
      ranges = {{0, output.memory.bytes}};
    }
  }
  return ranges_[writer] = std::make_shared<const std::vector<Ranges>>(std::move(all));
}

bool DirectTransfer::AllOpened() const {
  return std::all_of(counts_.opened.begin(), counts_.opened.end(), [](const Opened& opened) {
    return !opened.empty() && std::find(opened.begin(), opened.end(), false) == opened.end();
  });
}

void DirectTransfer::OnOperationChanged() {
  absl::MutexLock lock(&listeners_mutex_);
  for (OperationListener* listener : listeners_) listener->OnOperationChanged();
}

void DirectTransfer::OnDelivered() {
  {
    absl::MutexLock lock(&mutex_);
    ++counts_.delivered;
    size_t streams = 0;
    for (const Opened& opened : counts_.opened) streams += opened.size();
    if (!AllOpened() || counts_.delivered < streams) return;
  }
  hooks_->on_delivered(info_);
}

void DirectTransfer::Fail(bool bad_chunk, const std::string& why) {
  const auto operation = operation_.lock();
  if (operation == nullptr || !operation->ended().ok()) return;
  {
    absl::MutexLock lock(&mutex_);
    if (counts_.forgotten || std::exchange(counts_.failed, true)) return;
  }
  hooks_->on_failed(info_, bad_chunk, why);
}

void DirectTransfer::Leave(OperationListener* listener, bool delivered) {
  {
    absl::MutexLock lock(&listeners_mutex_);
    listeners_.erase(listener);
  }
  {
    absl::MutexLock lock(&mutex_);
    --counts_.open;
  }
  if (!delivered) Fail(false, "the client closed a stream before it had all outputs");
}

}  // namespace ringattn::worker
