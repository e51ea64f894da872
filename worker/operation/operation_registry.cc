#include "worker/operation/operation_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {

OperationRegistry::OperationRegistry(Device* device, MemoryBudget* budget,
                                     ReleasedCallback on_released, KeptOperations* kept)
    : device_(device), budget_(budget), on_released_(std::move(on_released)), kept_(kept) {}

absl::StatusOr<std::shared_ptr<ShardOperation>> OperationRegistry::Admit(
    const OperationInfo& info, std::unique_ptr<Operation> operation) {
  if (Find(info.id, info.generation) != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("operation ", info.id, " exists already"));
  }
  absl::StatusOr<PreparedOperation> prepared = Allocate(std::move(operation));
  if (!prepared.ok()) return prepared.status();
  return Admit(info, *std::move(prepared));
}

absl::StatusOr<PreparedOperation> OperationRegistry::Allocate(
    std::unique_ptr<Operation> operation) {
  const int64_t workspace_bytes = operation->workspace_bytes();
  const int64_t buffer_bytes = operation->buffer_bytes();
  absl::StatusOr<MemoryBudget::Reservation> reservation =
      budget_->Take(buffer_bytes + workspace_bytes);
  if (!reservation.ok() && workspace_bytes > 0) {
    return absl::Status(reservation.status().code(),
                        absl::StrCat("buffers of ", buffer_bytes, " and a kernel workspace of ",
                                     workspace_bytes, " bytes: ", reservation.status().message()));
  }
  if (!reservation.ok()) return reservation.status();
  if (absl::Status status = operation->Allocate(); !status.ok()) return status;
  return PreparedOperation{*std::move(reservation), std::move(operation)};
}

absl::StatusOr<std::shared_ptr<ShardOperation>> OperationRegistry::Admit(
    const OperationInfo& info, PreparedOperation prepared) {
  if (Find(info.id, info.generation) != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("operation ", info.id, " exists already"));
  }
  absl::MutexLock lock(&mutex_);
  ++alive_;
  if (prepared.operation->members().size() > 1) ++with_peers_;
  auto shard = std::make_shared<ShardOperation>(
      info, std::move(prepared), device_, [this, info](PreparedOperation ended, bool ended_well) {
        OnDestroyed(info, std::move(ended), ended_well);
      });
  operations_[info.id] = shard;
  return shard;
}

std::shared_ptr<ShardOperation> OperationRegistry::Find(const std::string& id,
                                                        uint64_t generation) const {
  absl::MutexLock lock(&mutex_);
  const auto found = operations_.find(id);
  if (found == operations_.end() || found->second->info().generation != generation) return nullptr;
  return found->second;
}

std::optional<int64_t> OperationRegistry::BytesOf(absl::string_view recipe) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, operation] : operations_) {
    const auto& its_recipe = operation->info().recipe;
    if (its_recipe != nullptr && *its_recipe == recipe) return operation->reserved_bytes();
  }
  return std::nullopt;
}

void OperationRegistry::Release(const std::string& id, uint64_t generation) {
  std::shared_ptr<ShardOperation> operation = Find(id, generation);
  if (operation == nullptr) return on_released_({id, generation});
  {
    absl::MutexLock lock(&mutex_);
    operations_.erase(id);
    releasing_[id] = generation;
  }
  operation->End(absl::AbortedError("the operation was released"));
}

void OperationRegistry::EndAll(const std::string& reason) {
  std::map<std::string, std::shared_ptr<ShardOperation>> operations;
  {
    absl::MutexLock lock(&mutex_);
    operations.swap(operations_);
    // The coordinator no longer waits for Released messages of this generation.
    releasing_.clear();
  }
  for (const auto& [id, operation] : operations) operation->End(absl::AbortedError(reason));
}

bool OperationRegistry::WaitUntilEmpty(absl::Time deadline) const {
  const auto empty = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return alive_ == 0; };
  absl::MutexLock lock(&mutex_);
  return AwaitUntil(mutex_, absl::Condition(&empty), deadline);
}

bool OperationRegistry::WaitUntilNoPeers(absl::Time deadline) const {
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return with_peers_ == 0; };
  absl::MutexLock lock(&mutex_);
  return AwaitUntil(mutex_, absl::Condition(&none), deadline);
}

// The memory is free or kept before on_released_ reports it.
void OperationRegistry::OnDestroyed(const OperationInfo& info, PreparedOperation prepared,
                                    bool ended_well) {
  const bool had_peers = prepared.operation->members().size() > 1;
  if (ended_well && kept_ != nullptr && info.recipe != nullptr) {
    kept_->Keep(*info.recipe, std::move(prepared));
  }
  { const PreparedOperation dropped = std::move(prepared); }
  bool released = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = releasing_.find(info.id);
    if (found != releasing_.end() && found->second == info.generation) {
      releasing_.erase(found);
      released = true;
    }
  }
  if (released) on_released_(info);
  // Last: a thread that waits for this may destroy the registry.
  absl::MutexLock lock(&mutex_);
  if (had_peers) --with_peers_;
  --alive_;
}

}  // namespace ringattn::worker
