#include "worker/service/reservations.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/many_documents.h"
#include "common/process/thread_priority.h"
#include "common/wire/durations.h"
#include "worker/operation/reserve_recipe.h"
#include "worker/service/reserve_decoder.h"

namespace ringattn::worker {
namespace {

// Returns whether the plan may have more than kManyDocuments. The bound uses the message only: each
// segment of a dilated level counts once for each offset.
bool MayHaveManyDocuments(const v1::Reserve& reserve) {
  constexpr uint64_t kMany = kManyDocuments;
  constexpr uint64_t kDocumentsPerPart = 64;  // as much time as the program of a part takes
  const v1::AttentionShape& shape = reserve.shape();
  const uint64_t documents = std::max(1, shape.packed().cu_seqlens_q_size() - 1);
  const auto& levels = reserve.options().dilation_levels();
  if (levels.empty()) return documents > kMany;
  uint64_t planned = 0;
  for (const v1::DilationLevel& level : levels) {
    const uint64_t whole = shape.seq_len_q() / std::max<uint64_t>(1, level.segment_length());
    if (whole > kMany) return true;
    const uint64_t offsets =
        level.has_offset()
            ? 1
            : std::min<uint64_t>(std::max<uint64_t>(1, level.dilation_rate()), shape.num_heads());
    planned += (whole + documents + kDocumentsPerPart) * offsets;  // both factors below 2^32
    if (planned > kMany) return true;
  }
  return false;
}

OperationInfo InfoOf(const v1::Reserve& reserve, std::shared_ptr<const std::string> recipe) {
  OperationInfo info{reserve.operation_id(), reserve.generation(),  reserve.with_timeline(),
                     reserve.request_id(),   reserve.traceparent(), std::move(recipe)};
  const auto start = [](const auto& run) {
    RunStart start;
    if (run.has_preempt_after()) start.preempt_after = ToDuration(run.preempt_after());
    return start;
  };
  if (reserve.has_run_when_uploaded()) info.run_when_uploaded = start(reserve.run_when_uploaded());
  // Unless the worker copies the tensors inline.
  if (reserve.has_inline_run() && !reserve.places().empty()) {
    info.run_when_uploaded = start(reserve.inline_run());
  }
  return info;
}

// `residual`: what the operation reads, or null.
absl::StatusOr<std::unique_ptr<Operation>> DecodeAndBind(
    const v1::Reserve& reserve, const RingMembership& place,
    const std::shared_ptr<const Residual>& residual, Device* device) {
  absl::StatusOr<ReservedProgram> decoded =
      DecodeReserve(reserve, place.rank, place.world_size, place.hosts);
  if (!decoded.ok()) return decoded.status();
  std::vector<LentBuffer> lent;
  if (residual != nullptr) {
    absl::StatusOr<std::vector<LentBuffer>> buffers = Residual::LendTo(decoded->program, residual);
    if (!buffers.ok()) return buffers.status();
    lent = *std::move(buffers);
  }
  return Operation::Bind(std::move(decoded->spec), std::move(decoded->plan),
                         std::move(decoded->program), std::move(decoded->members), device,
                         std::move(lent), place.arrival);
}

}  // namespace

Reservations::Reservations(Device* device, OperationRegistry* registry,
                           const ResidualStore* residuals, KeptOperations* kept,
                           HostQueue* background, RunOnControl on_control, Done done,
                           PreparationDone on_prepared)
    : device_(device),
      registry_(registry),
      residuals_(residuals),
      kept_(kept),
      background_(background),
      on_control_(std::move(on_control)),
      done_(std::move(done)),
      on_prepared_(std::move(on_prepared)) {}

void Reservations::Reserve(std::shared_ptr<v1::Reserve> reserve, RingMembership place) {
  const std::string& id = reserve->operation_id();
  if (pending_.contains(id)) {
    return Fail(*reserve,
                absl::InvalidArgumentError(absl::StrCat("operation ", id, " exists already")));
  }
  if (reserve->has_prepare_only() && !MayBePreparedOnly(*reserve)) {
    return Fail(*reserve, absl::InvalidArgumentError(
                              "malformed Reserve: prepare_only: the operation has tensors"));
  }
  auto pending = std::make_shared<Pending>();
  pending->reserve = reserve;
  pending->place = std::move(place);
  // Looked up now, in message order: a residual that is dropped later stays valid for this request.
  pending->residual = residuals_->Find(reserve->residual());
  if (!reserve->residual().empty() && pending->residual == nullptr) {
    return Fail(*reserve, absl::NotFoundError(
                              absl::StrCat("this worker has no residual ", reserve->residual())));
  }
  if (MayBeKept(*reserve)) {
    pending->recipe = std::make_shared<const std::string>(RecipeOf(*reserve));
    if (reserve->has_prepare_only()) {
      if (Renew(*pending)) return;
    } else if (std::optional<PreparedOperation> kept = kept_->Take(*pending->recipe)) {
      const int64_t workspace_bytes = kept->operation->workspace_bytes();
      return done_(*reserve, registry_->Admit(InfoOf(*reserve, pending->recipe), *std::move(kept)),
                   workspace_bytes);
    }
  }
  // The coordinator sends few documents inline, and later runs must not overtake an inline run.
  if (!reserve->has_inline_run() && MayHaveManyDocuments(*reserve)) {
    pending_[id] = pending;
    return DecodeInBackground(pending);
  }
  while (AdmitUnlessEvicted(*pending,
                            DecodeAndBind(*reserve, pending->place, pending->residual, device_))) {
  }
}

void Reservations::DecodeInBackground(const std::shared_ptr<Pending>& pending) {
  auto decode = [this, pending] {
    LowerThreadPriority();
    auto operation = std::make_shared<Decoded>(
        pending->cancelled
            ? absl::CancelledError("released before it was decoded")
            : DecodeAndBind(*pending->reserve, pending->place, pending->residual, device_));
    on_control_([this, pending, operation] { Finish(pending, std::move(*operation)); });
    return absl::OkStatus();
  };
  background_->Start(std::move(decode), {}, HostQueue::OnFailure::kSkip);
}

void Reservations::Release(const std::string& id, uint64_t generation) {
  const auto found = pending_.find(id);
  if (found != pending_.end() && found->second->reserve->generation() == generation) {
    // Nothing is reserved yet, so the answer need not wait for the decoder.
    found->second->cancelled = true;
    pending_.erase(found);
  }
  registry_->Release(id, generation);
}

void Reservations::ForgetAll() {
  for (const auto& [id, pending] : pending_) pending->cancelled = true;
  pending_.clear();
}

void Reservations::Finish(const std::shared_ptr<Pending>& pending, Decoded operation) {
  const auto found = pending_.find(pending->reserve->operation_id());
  if (found == pending_.end() || found->second != pending) return;  // released or forgotten
  // While it is in pending_, no other request takes its id.
  if (AdmitUnlessEvicted(*pending, std::move(operation))) return DecodeInBackground(pending);
  pending_.erase(pending->reserve->operation_id());
}

bool Reservations::AdmitUnlessEvicted(const Pending& pending, Decoded operation) {
  const v1::Reserve& reserve = *pending.reserve;
  if (!operation.ok()) {
    Fail(reserve, operation.status());
    return false;
  }
  if (reserve.has_prepare_only()) return KeepUnlessEvicted(pending, *std::move(operation));
  const int64_t workspace_bytes = (*operation)->workspace_bytes();
  auto admitted = registry_->Admit(InfoOf(reserve, pending.recipe), *std::move(operation));
  // The budget has evicted for the bytes, but free device memory may be in pieces.
  if (absl::IsResourceExhausted(admitted.status()) &&
      kept_->Evict(std::numeric_limits<int64_t>::max())) {
    return true;
  }
  done_(reserve, std::move(admitted), workspace_bytes);
  return false;
}

bool Reservations::KeepUnlessEvicted(const Pending& pending, std::unique_ptr<Operation> operation) {
  const v1::Reserve& reserve = *pending.reserve;
  const int64_t workspace_bytes = operation->workspace_bytes();
  Preparation made{.bytes = operation->buffer_bytes() + workspace_bytes};
  if (absl::Status status = kept_->CheckMayKeep(made.bytes); !status.ok()) {
    Fail(reserve, status, workspace_bytes);
    return false;
  }
  absl::StatusOr<PreparedOperation> prepared = registry_->Allocate(std::move(operation));
  if (absl::IsResourceExhausted(prepared.status()) &&
      kept_->Evict(std::numeric_limits<int64_t>::max())) {
    return true;
  }
  if (!prepared.ok()) {
    Fail(reserve, prepared.status(), workspace_bytes);
    return false;
  }
  kept_->Keep(*pending.recipe, *std::move(prepared));
  kept_->Hold(*pending.recipe, ToDuration(reserve.prepare_only().ttl()));
  on_prepared_(reserve, made, workspace_bytes);
  return false;
}

bool Reservations::Renew(const Pending& pending) {
  const v1::Reserve& reserve = *pending.reserve;
  // An operation in use is kept once it has ended well.
  std::optional<int64_t> bytes = registry_->BytesOf(*pending.recipe);
  if (!bytes) bytes = kept_->BytesOf(*pending.recipe);
  if (!bytes) return false;
  kept_->Hold(*pending.recipe, ToDuration(reserve.prepare_only().ttl()));
  on_prepared_(reserve, Preparation{.bytes = *bytes, .found = true}, 0);
  return true;
}

void Reservations::Fail(const v1::Reserve& reserve, const absl::Status& status,
                        int64_t workspace_bytes) {
  if (reserve.has_prepare_only()) return on_prepared_(reserve, status, workspace_bytes);
  done_(reserve, status, workspace_bytes);
}

}  // namespace ringattn::worker
