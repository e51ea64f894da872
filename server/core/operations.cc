// The workers' side of a request: memory and uploads.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/core/failures.h"
#include "server/core/impl.h"
#include "server/core/reserve_message.h"

namespace ringattn::server {

using Phase = OperationRecord::Phase;

namespace {

// No device has more, and sums of it do not overflow.
int64_t WorkspaceBytes(const v1::Reserved& reserved) {
  return static_cast<int64_t>(std::min(reserved.workspace_bytes(), uint64_t{1} << 60));
}

}  // namespace

void Coordinator::Impl::StartOperation(RequestRecord& request,
                                       const std::vector<ConnectionId>& members,
                                       const std::vector<int64_t>& bytes) {
  LeaveQueue(request.arrived.stream);
  const uint64_t sequence = ++last_operation_;
  const std::string id = absl::StrCat(ring_.generation, "-", sequence);
  request.operation_id = id;

  OperationRecord& operation = operations_[id];
  operation.id = id;
  operation.stream = request.arrived.stream;
  operation.progress_timeout = ProgressTimeout(*request.plan);
  Enter(operation, Phase::kReserving);

  std::vector<uint32_t> ranks;
  for (ConnectionId connection : members) ranks.push_back(*RankOf(connection));
  const v1::Reserve reserve =
      MakeReserve(request.arrived, *request.plan, id, ring_.generation, ranks);
  for (size_t i = 0; i < members.size(); ++i) {
    Member& member = operation.members.emplace_back();
    member.connection = members[i];
    member.bytes = bytes[i];
    *Send(members[i])->mutable_reserve() = reserve;
  }
}

void Coordinator::Impl::OnReserved(ConnectionId connection, const v1::Reserved& reserved) {
  const MemberRef ref = FindMember(connection, reserved.operation_id(), reserved.generation());
  if (ref.operation == nullptr || ref.member->reserved) return;
  OperationRecord& operation = *ref.operation;
  if (!reserved.ok()) {
    ref.member->released = true;  // it holds nothing and will not answer Release
    if (operation.phase == Phase::kReserving) Refuse(operation, *ref.member, reserved);
    return EraseIfReleased(operation);
  }
  ref.member->reserved = true;
  if (operation.phase != Phase::kReserving) return;
  if (reserved.bytes() > 0) ref.member->bytes = reserved.bytes();
  ref.member->workspace_bytes = WorkspaceBytes(reserved);
  const bool all = std::all_of(operation.members.begin(), operation.members.end(),
                               [](const Member& member) { return member.reserved; });
  if (all) Accept(operation);
}

// All or nothing: what the others set aside goes back before the next attempt.
void Coordinator::Impl::Refuse(OperationRecord& operation, const Member& by,
                               const v1::Reserved& reserved) {
  const StreamId stream = *operation.stream;
  operation.was_refused = true;
  // The plan knows the buffers alone. What the kernels need beside them is news once:
  // with it admission decides anew whether the request waits, fits elsewhere or never does.
  RequestRecord& request = requests_.at(stream);
  const int64_t workspace = WorkspaceBytes(reserved);
  if (workspace > request.WorkspaceOn(by.connection)) {
    request.workspace_bytes[by.connection] = workspace;
    Requeue(operation);
    return ReleaseAll(operation);
  }
  bool others = false;
  for (const auto& [id, other] : operations_) {
    for (const Member& member : other.members) {
      others |= !other.was_refused && member.connection == by.connection;
    }
  }
  if (others) {
    Requeue(operation);
    request.blocked_until_release = releases_ + 1;
    return ReleaseAll(operation);
  }
  EndRequest(stream, ReserveRefused(*RankOf(by.connection), NameOf(by.connection), by.bytes,
                                    reserved.reason(), config_.retry_after));
}

// The head of the queue again: one operation reserves at a time, so none that came
// later can have gone before it.
void Coordinator::Impl::Requeue(OperationRecord& operation) {
  RequestRecord& request = requests_.at(*operation.stream);
  request.operation_id.clear();
  queue_.push_front(*operation.stream);
  queued_bytes_ += request.bytes;
  operation.stream.reset();
}

void Coordinator::Impl::Accept(OperationRecord& operation) {
  RequestRecord& request = requests_.at(*operation.stream);
  operation.was_accepted = true;
  Enter(operation, Phase::kUploading);
  request.accepted_at = now_;
  request.generation = ring_.generation;

  request.plan->workspace_bytes.clear();
  for (const Member& member : operation.members) {
    request.plan->workspace_bytes.push_back(member.workspace_bytes);
  }

  AcceptRequest accept;
  accept.stream = request.arrived.stream;
  accept.request_id = request.arrived.request_id;
  accept.operation_id = operation.id;
  accept.generation = ring_.generation;
  accept.plan = *request.plan;
  for (const Member& member : operation.members) {
    const v1::Register& registration = workers_.at(member.connection).registration;
    accept.members.push_back({member.connection, registration.name(), registration.data_address()});
    request.member_names.push_back(registration.name());
  }
  Emit(std::move(accept));
  SetState(request, v1::OPERATION_STATE_UPLOADING);
  CompleteUpload(operation);
}

// A shard without rows is uploaded before its operation is accepted.
void Coordinator::Impl::OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded) {
  const MemberRef ref = FindMember(connection, uploaded.operation_id(), uploaded.generation());
  if (ref.operation == nullptr) return;
  ref.member->uploaded = true;
  if (ref.operation->phase != Phase::kUploading) return;
  ref.operation->last_advance = now_;
  CompleteUpload(*ref.operation);
}

void Coordinator::Impl::CompleteUpload(OperationRecord& operation) {
  for (const Member& member : operation.members) {
    if (!member.uploaded) return;
  }
  operation.run_sequence = ++last_run_;
  Enter(operation, Phase::kUploaded);
}

// The request has ended; the workers are freed as fast as they can be. Those that
// compute finish their exchanges first, or their peers would hang.
void Coordinator::Impl::CloseOperation(OperationRecord& operation) {
  operation.pending_failure.reset();
  operation.pending_failure_due = absl::InfiniteFuture();
  switch (operation.phase) {
    case Phase::kReserving:
    case Phase::kUploading:
    case Phase::kUploaded:
    case Phase::kDownloading:
      return ReleaseAll(operation);
    case Phase::kRunning:
      for (const Member& member : operation.members) {
        if (member.finished) continue;
        v1::Cancel* cancel = Send(member.connection)->mutable_cancel();
        cancel->set_operation_id(operation.id);
        cancel->set_generation(ring_.generation);
      }
      return FinishRunIfDone(operation);
    case Phase::kReleasing:
      return;
  }
}

void Coordinator::Impl::ReleaseAll(OperationRecord& operation) {
  Enter(operation, Phase::kReleasing);
  for (const Member& member : operation.members) {
    if (member.released) continue;
    v1::Release* release = Send(member.connection)->mutable_release();
    release->set_operation_id(operation.id);
    release->set_generation(ring_.generation);
  }
}

void Coordinator::Impl::OnReleased(ConnectionId connection, const v1::Released& released) {
  const MemberRef ref = FindMember(connection, released.operation_id(), released.generation());
  if (ref.operation == nullptr || ref.operation->phase != Phase::kReleasing) return;
  ref.member->released = true;
  EraseIfReleased(*ref.operation);
}

void Coordinator::Impl::EraseIfReleased(OperationRecord& operation) {
  if (operation.phase != Phase::kReleasing) return;
  for (const Member& member : operation.members) {
    if (!member.released) return;
  }
  if (!operation.was_refused) ++releases_;
  operations_.erase(std::string(operation.id));
}

// A member that lives and whose transfer stands still: nothing else would notice.
std::optional<std::string> Coordinator::Impl::WhyStalled(const OperationRecord& operation,
                                                         const Member& member) const {
  const bool uploading = operation.phase == Phase::kUploading;
  if (!uploading && operation.phase != Phase::kDownloading) return std::nullopt;
  if (!member.stands_since || (uploading && member.uploaded)) return std::nullopt;
  const absl::Duration staging =
      CoordinatorConfig::kStagingRounds * config_.limits.download_idle_timeout;
  const absl::Duration limit =
      config_.transfer_timeout + (uploading ? absl::ZeroDuration() : staging);
  const absl::Duration stood = now_ - *member.stands_since;
  if (stood <= limit) return std::nullopt;
  return absl::StrCat(
      uploading ? "it took no bytes of its inputs for " : "it sent no bytes of its outputs for ",
      absl::FormatDuration(stood), " in operation ", operation.id);
}

void Coordinator::Impl::CheckOperationTimers() {
  std::vector<std::pair<StreamId, Failure>> ended;
  std::vector<std::pair<ConnectionId, std::string>> mute;
  for (const auto& [id, operation] : operations_) {
    const bool reserving = operation.phase == Phase::kReserving;
    if ((reserving || operation.phase == Phase::kReleasing) &&
        now_ - operation.phase_since > config_.control_timeout) {
      for (const Member& member : operation.members) {
        if (reserving ? member.reserved : member.released) continue;
        mute.emplace_back(member.connection,
                          absl::StrCat("it did not answer ", reserving ? "Reserve" : "Release"));
      }
    }
    if (!operation.stream) continue;
    for (const Member& member : operation.members) {
      std::optional<std::string> why = WhyStalled(operation, member);
      if (!why) continue;
      ++(operation.phase == Phase::kUploading ? stalled_uploads_ : stalled_downloads_);
      mute.emplace_back(member.connection, *std::move(why));
    }
    if (operation.pending_failure_due <= now_) {
      ended.emplace_back(*operation.stream, *operation.pending_failure);
    } else if (operation.phase == Phase::kUploading &&
               now_ - operation.last_advance > config_.limits.upload_idle_timeout) {
      ended.emplace_back(*operation.stream, UploadIdle(config_.limits.upload_idle_timeout));
    } else if (operation.phase == Phase::kDownloading &&
               now_ - operation.last_advance > config_.limits.download_idle_timeout) {
      ended.emplace_back(*operation.stream, DownloadIdle(config_.limits.download_idle_timeout));
    }
  }
  for (const auto& [connection, reason] : mute) LoseWorker(connection, reason, /*drop=*/true);
  for (const auto& [stream, failure] : ended) EndRequest(stream, failure);
}

void Coordinator::Impl::Enter(OperationRecord& operation, Phase phase) {
  operation.phase = phase;
  operation.phase_since = now_;
  operation.last_advance = now_;
  for (Member& member : operation.members) member.stands_since.reset();
}

Coordinator::Impl::MemberRef Coordinator::Impl::FindMember(ConnectionId connection,
                                                           const std::string& operation_id,
                                                           uint64_t generation) {
  if (generation != ring_.generation) return {};
  const auto found = operations_.find(operation_id);
  if (found == operations_.end()) return {};
  std::vector<Member>& members = found->second.members;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (members[rank].connection == connection) {
      return {&found->second, &members[rank], static_cast<int>(rank)};
    }
  }
  return {};
}

}  // namespace ringattn::server
