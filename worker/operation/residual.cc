#include "worker/operation/residual.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {

std::vector<TensorId> ResidualTensors(const AttentionSpec& spec) {
  std::vector<TensorId> tensors =
      ShardInputsOf(spec, Direction::kBackward, /*recompute_forward=*/false);
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), IsSentBesideResidual),
                tensors.end());
  return tensors;
}

absl::StatusOr<std::vector<LentBuffer>> Residual::LendTo(
    const Program& program, const std::shared_ptr<const Residual>& residual) {
  std::vector<LentBuffer> lent;
  for (size_t buffer = 0; buffer < program.buffers.size(); ++buffer) {
    const std::optional<TensorId>& input = program.buffers[buffer].input;
    if (!input.has_value() || IsSentBesideResidual(*input)) continue;
    const auto kept = residual->buffers_.find(*input);
    if (kept == residual->buffers_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the residual has no ", TensorName(*input), " for this operation"));
    }
    // The loan owns the whole residual, so that its bytes stay counted in the budget.
    lent.push_back({static_cast<BufferId>(buffer),
                    std::shared_ptr<DeviceBuffer>(residual, kept->second.get())});
  }
  return lent;
}

int64_t ResidualBytes(Operation& operation) {
  int64_t bytes = 0;
  for (TensorId id : ResidualTensors(operation.spec())) {
    const std::shared_ptr<DeviceBuffer> buffer = operation.ShareBuffer(id);
    if (buffer != nullptr) bytes += buffer->bytes();
  }
  return bytes;
}

std::shared_ptr<const Residual> MakeResidual(Operation& operation,
                                             MemoryBudget::Reservation& reservation) {
  Residual::Buffers buffers;
  for (TensorId id : ResidualTensors(operation.spec())) {
    std::shared_ptr<DeviceBuffer> buffer = operation.ShareBuffer(id);
    if (buffer != nullptr) buffers[id] = std::move(buffer);
  }
  const int64_t bytes = ResidualBytes(operation);
  return std::make_shared<const Residual>(std::move(buffers), reservation.Split(bytes));
}

void ResidualStore::Put(const std::string& id, std::shared_ptr<const Residual> residual) {
  absl::MutexLock lock(&mutex_);
  const int64_t bytes = residual->bytes();
  if (residuals_.emplace(id, std::move(residual)).second) bytes_ += bytes;
}

std::shared_ptr<const Residual> ResidualStore::Find(const std::string& id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = residuals_.find(id);
  return found == residuals_.end() ? nullptr : found->second;
}

void ResidualStore::Drop(const std::string& id) {
  std::shared_ptr<const Residual> dropped;  // destroyed after the lock is released
  absl::MutexLock lock(&mutex_);
  const auto found = residuals_.find(id);
  if (found == residuals_.end()) return;
  dropped = std::move(found->second);
  bytes_ -= dropped->bytes();
  residuals_.erase(found);
}

void ResidualStore::Clear() {
  std::map<std::string, std::shared_ptr<const Residual>> dropped;
  absl::MutexLock lock(&mutex_);
  dropped.swap(residuals_);
  bytes_ = 0;
}

int64_t ResidualStore::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(residuals_.size());
}

int64_t ResidualStore::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace ringattn::worker
