#include "server/core/requests/operations.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {
namespace {

using Memory = Operation::Memory;
using Phase = Operation::Phase;

// Clamped above any device's memory, so that sums do not overflow.
int64_t WorkspaceBytes(const v1::Reserved& reserved) {
  return static_cast<int64_t>(std::min(reserved.workspace_bytes(), uint64_t{1} << 60));
}

// Clamped above the ratio of any two kernels of a device. NaN and values below 1 count as 1.
double Slowdown(const v1::Reserved& reserved) {
  constexpr double kMost = 1000;
  return reserved.slowdown() >= 1 ? std::min(reserved.slowdown(), kMost) : 1;
}

}  // namespace

bool Operation::IsOn(ConnectionId connection) const {
  return std::any_of(members.begin(), members.end(),
                     [&](const Member& member) { return member.connection == connection; });
}

// ------------------------------------------------------------------- reserving

std::string Operations::NextId(uint64_t generation) {
  return absl::StrCat(generation, "-", ++last_id_);
}

bool Operations::Start(Order order) {
  const std::string id = order.reserve.operation_id();
  Operation& operation = operations_[id];
  operation.id = id;
  operation.generation = order.reserve.generation();
  operation.order_id = order.stream;
  operation.stream = order.stream;
  operation.residual = order.residual;
  operation.client = order.client;
  operation.cost_seconds = order.cost_seconds;
  operation.planning_seconds = order.planning_seconds;
  operation.run_seconds = order.run_seconds;
  operation.is_express = order.is_express;
  operation.reserves_alone = order.reserves_alone;
  operation.may_preempt = order.may_preempt;
  if (!order.reserve.places().empty()) {
    operation.path = Operation::Path::kClientMemory;
  } else if (!order.tokens.empty()) {
    operation.path = Operation::Path::kDirect;
  } else if (order.reserve.has_prepare_only()) {
    operation.path = Operation::Path::kNone;
  }
  operation.step_seconds = order.step_seconds;
  operation.reserve_limit = ReserveLimit(operation);
  SetLimits(operation);
  Enter(operation, Phase::kReserving);
  for (size_t i = 0; i < order.members.size(); ++i) {
    Member& member = operation.members.emplace_back();
    member.connection = order.members[i];
    member.bytes = order.bytes[i];
    v1::Reserve* reserve = batch_.Send(member.connection)->mutable_reserve();
    if (i + 1 == order.members.size()) {
      *reserve = std::move(order.reserve);
    } else {
      *reserve = order.reserve;
    }
    if (!order.tokens.empty()) reserve->set_token(order.tokens[i]);
    if (order.inline_inputs != nullptr && MayBeInline(operation)) {
      SendInline(operation, *order.inline_inputs, reserve);
    } else if (order.members.size() != 1 || !MayRunWhenUploaded(operation)) {
      continue;
    } else if (order.may_be_inline_in_memory) {
      SendInlineInMemory(operation, reserve);
    } else {
      operation.runs_when_uploaded = true;
      v1::RunWhenUploaded* run = reserve->mutable_run_when_uploaded();
      if (operation.preempts) SetDuration(config_.preempt_after, run->mutable_preempt_after());
    }
  }
  return operation.is_inline();
}

void Operations::TakeInline(Operation& operation, Member& member, v1::Finished& finished) {
  operation.reservation = Operation::Reservation::kGranted;
  member.workspace_bytes = WorkspaceBytes(finished.reserved());
  member.outputs.Swap(finished.mutable_outputs());
  member.delivered = finished.ok();
  member.memory = Memory::kReleased;
}

// A worker decodes expensive plans one after the other, so the plans before this one count too.
absl::Duration Operations::ReserveLimit(const Operation& operation) const {
  double seconds = operation.planning_seconds;
  for (const auto& [id, other] : operations_) {
    if (&other != &operation && other.phase == Phase::kReserving) seconds += other.planning_seconds;
  }
  return config_.control_timeout + config_.reserve_factor * absl::Seconds(seconds);
}

void Operations::SetLimits(Operation& operation) const {
  const auto scaled = [&operation](double factor, double seconds) {
    return factor * operation.slowdown * absl::Seconds(seconds);
  };
  operation.progress_timeout =
      std::max(config_.progress_timeout, scaled(config_.progress_factor, operation.step_seconds));
  operation.run_limit =
      std::max(config_.run_time_floor, scaled(config_.run_time_factor, operation.run_seconds));
}

Operations::ReserveResult Operations::OnReserved(ConnectionId connection,
                                                 const v1::Reserved& reserved) {
  using Kind = ReserveResult::Kind;
  const MemberRef ref = FindMember(connection, reserved.operation_id(), reserved.generation());
  if (ref.operation == nullptr || ref.member->memory != Memory::kRequested) return {};
  Operation& operation = *ref.operation;
  const bool waits =
      operation.phase == Phase::kReserving || (operation.is_inline() && operation.stream);
  if (operation.path == Operation::Path::kInline && reserved.ok()) return {};  // see Finished
  ref.member->workspace_bytes = WorkspaceBytes(reserved);
  if (!reserved.ok()) {
    ref.member->memory = Memory::kReleased;  // it receives no Release
    if (operation.is_inline()) EndInline(operation);
    if (waits) return {Kind::kRefused, &operation, ref.member};
    EraseIfReleased(operation);
    return {};
  }
  ref.member->memory = Memory::kHeld;
  if (operation.is_inline() && !GoOnWithMessages(operation)) return {};
  if (!waits) return {};
  if (reserved.bytes() > 0) ref.member->bytes = reserved.bytes();
  operation.slowdown = std::max(operation.slowdown, Slowdown(reserved));
  SetLimits(operation);
  ref.member->residual_bytes = static_cast<int64_t>(
      std::min(reserved.residual_bytes(), static_cast<uint64_t>(ref.member->bytes)));
  const bool only_prepared = operation.is_only_prepared();
  if (only_prepared) {
    operation.found += reserved.found() ? 1 : 0;
    ref.member->memory = Memory::kReleased;  // free to every request
  }
  const Memory due = only_prepared ? Memory::kReleased : Memory::kHeld;
  const bool all = std::all_of(operation.members.begin(), operation.members.end(),
                               [due](const Member& member) { return member.memory == due; });
  if (!all) return {};
  return {only_prepared ? Kind::kAllPrepared : Kind::kAllReserved, &operation, ref.member};
}

void Operations::Withdraw(Operation& operation) {
  operation.stream.reset();
  ReleaseAll(operation);
}

bool Operations::OthersHoldMemoryOn(ConnectionId connection) const {
  return std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    return entry.second.was_accepted() && entry.second.IsOn(connection);
  });
}

bool Operations::OthersReserve(const Operation* except) const {
  return std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    return &entry.second != except && !entry.second.was_accepted();
  });
}

bool Operations::OneReservesAlone() const {
  return std::any_of(operations_.begin(), operations_.end(), [](const auto& entry) {
    return entry.second.reserves_alone && entry.second.phase == Phase::kReserving;
  });
}

void Operations::Accept(Operation& operation) {
  operation.reservation = Operation::Reservation::kGranted;
  Enter(operation, Phase::kUploading);
  CompleteUpload(operation);
}

// ------------------------------------------------------------------- transfers

// A member with an empty shard sends Uploaded before its operation is accepted.
Operation* Operations::OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded) {
  const MemberRef ref = FindMember(connection, uploaded.operation_id(), uploaded.generation());
  if (ref.operation == nullptr) return nullptr;
  ref.member->uploaded = true;
  if (ref.operation->phase != Phase::kUploading) return nullptr;
  ref.operation->last_advance = batch_.now();
  CompleteUpload(*ref.operation);
  if (!ref.operation->runs_when_uploaded) return nullptr;
  EnterRun(*ref.operation);
  return ref.operation;
}

void Operations::CompleteUpload(Operation& operation) {
  for (const Member& member : operation.members) {
    if (!member.uploaded) return;
  }
  Enter(operation, Phase::kUploaded);
}

void Operations::OnTransferProgress(Operation& operation, Phase phase) {
  if (operation.phase == phase) operation.last_advance = batch_.now();
}

void Operations::OnStalled(Operation& operation, const std::vector<int>& ranks) {
  if (operation.bypasses_coordinator()) return;  // members report their own progress
  for (size_t rank = 0; rank < operation.members.size(); ++rank) {
    std::optional<absl::Time>& since = operation.members[rank].stalled_since;
    const bool named = std::find(ranks.begin(), ranks.end(), static_cast<int>(rank)) != ranks.end();
    since = named ? since.value_or(batch_.now()) : std::optional<absl::Time>();
  }
}

Operations::Transferred Operations::OnTransferProgress(ConnectionId connection,
                                                       const v1::TransferProgress& progress) {
  const MemberRef ref = FindMember(connection, progress.operation_id(), progress.generation());
  if (ref.operation == nullptr || !ref.operation->bypasses_coordinator() || !ref.operation->stream)
    return {};
  Member& member = *ref.member;
  const bool moved =
      progress.received() > member.received_bytes || progress.sent() > member.sent_bytes;
  member.received_bytes = std::max(member.received_bytes, progress.received());
  member.sent_bytes = std::max(member.sent_bytes, progress.sent());
  member.waits_for_client = progress.waits_for_client();
  if (moved || member.waits_for_client) member.stalled_since = batch_.now();
  const Phase phase = ref.operation->phase;
  if (moved && (phase == Phase::kUploading || phase == Phase::kDownloading)) {
    ref.operation->last_advance = batch_.now();
  }
  return {ref.operation, ref.ring_rank};
}

Operation* Operations::OnDelivered(ConnectionId connection, const v1::Delivered& delivered) {
  const MemberRef ref = FindMember(connection, delivered.operation_id(), delivered.generation());
  if (ref.operation == nullptr || !ref.operation->bypasses_coordinator()) return nullptr;
  ref.member->delivered = true;
  return AllDelivered(*ref.operation) ? ref.operation : nullptr;
}

bool Operations::AllDelivered(const Operation& operation) {
  return operation.bypasses_coordinator() &&
         std::all_of(operation.members.begin(), operation.members.end(),
                     [](const Member& member) { return member.delivered; });
}

// The client's idle time counts only while a member waits for the client.
void Operations::WatchMembers(Operation& operation) {
  const bool uploading = operation.phase == Phase::kUploading;
  if (!operation.bypasses_coordinator() || (!uploading && operation.phase != Phase::kDownloading))
    return;
  bool waits_for_client = false;
  for (Member& member : operation.members) {
    if (uploading ? member.uploaded : member.delivered) continue;
    if (!member.waits_for_client) continue;
    waits_for_client = true;
    member.stalled_since = batch_.now();
  }
  if (!waits_for_client) operation.last_advance = batch_.now();
}

// --------------------------------------------------------------------- the end

void Operations::FailLater(Operation& operation, Failure failure, absl::Duration delay) {
  operation.pending_failure = std::move(failure);
  operation.pending_failure_due = batch_.now() + delay;
}

void Operations::Close(Operation& operation, bool keep_residual) {
  operation.stream.reset();
  operation.pending_failure.reset();
  operation.pending_failure_due = absl::InfiniteFuture();
  switch (operation.phase) {
    case Phase::kReserving:
    case Phase::kUploading:
    case Phase::kUploaded:
    case Phase::kDownloading:
      return ReleaseAll(operation, keep_residual);
    case Phase::kRunning:
      for (const Member& member : operation.members) {
        if (member.finished) continue;
        v1::Cancel* cancel = batch_.Send(member.connection)->mutable_cancel();
        cancel->set_operation_id(operation.id);
        cancel->set_generation(operation.generation);
      }
      if (AllFinished(operation)) ReleaseAll(operation);
      return;
    case Phase::kReleasing:
      return;
  }
}

void Operations::ReleaseAll(Operation& operation, bool keep_residual) {
  Enter(operation, Phase::kReleasing);
  for (Member& member : operation.members) {
    if (member.memory == Memory::kReleased) continue;
    if (keep_residual) member.bytes -= member.residual_bytes;
    v1::Release* release = batch_.Send(member.connection)->mutable_release();
    release->set_operation_id(operation.id);
    release->set_generation(operation.generation);
    release->set_keep_residual(keep_residual);
  }
  // The member has released the memory already.
  if (operation.is_inline()) EraseIfReleased(operation);
}

void Operations::OnReleased(ConnectionId connection, const v1::Released& released) {
  const MemberRef ref = FindMember(connection, released.operation_id(), released.generation());
  if (ref.operation == nullptr || ref.operation->phase != Phase::kReleasing) return;
  ref.member->memory = Memory::kReleased;
  EraseIfReleased(*ref.operation);
}

void Operations::EraseIfReleased(Operation& operation) {
  if (operation.phase != Phase::kReleasing) return;
  for (const Member& member : operation.members) {
    if (member.memory != Memory::kReleased) return;
  }
  if (operation.reservation != Operation::Reservation::kRejected) ++releases_;
  if (operation.held_failure) batch_.Emit(*std::move(operation.held_failure));
  operations_.erase(std::string(operation.id));
}

std::vector<FailRequest> Operations::Clear() {
  std::vector<FailRequest> held;
  for (auto& [id, operation] : operations_) {
    if (operation.phase == Phase::kRunning) Charge(operation);
    if (operation.held_failure) held.push_back(*std::move(operation.held_failure));
  }
  operations_.clear();
  last_finished_.clear();
  ++releases_;
  return held;
}

// ---------------------------------------------------------------------- timers

// Detects a live member whose transfer has stalled, which no other timeout covers.
std::optional<std::string> Operations::DescribeStall(const Operation& operation,
                                                     const Member& member) const {
  const bool uploading = operation.phase == Phase::kUploading;
  if (!uploading && operation.phase != Phase::kDownloading) return std::nullopt;
  const bool done = uploading ? member.uploaded : member.delivered;
  if (!member.stalled_since || done) return std::nullopt;
  const absl::Duration staging =
      CoordinatorConfig::kStagingRounds * config_.limits.download_idle_timeout;
  const absl::Duration limit =
      config_.transfer_timeout + (uploading ? absl::ZeroDuration() : staging);
  const absl::Duration stalled = batch_.now() - *member.stalled_since;
  if (stalled <= limit) return std::nullopt;
  return absl::StrCat(
      uploading ? "it took no bytes of its inputs for " : "it sent no bytes of its outputs for ",
      absl::FormatDuration(stalled), " in operation ", operation.id);
}

void Operations::CheckMembers(const Operation& operation, Overdue* overdue) {
  if (operation.phase == Phase::kReleasing &&
      batch_.now() - operation.phase_since > config_.control_timeout) {
    for (const Member& member : operation.members) {
      if (member.memory == Memory::kReleased) continue;
      overdue->members.push_back(
          {member.connection, LossReason::kNoAnswer, "it did not answer Release"});
    }
  }
  if (!operation.stream) return;
  for (const Member& member : operation.members) {
    std::optional<std::string> why = DescribeStall(operation, member);
    if (!why) continue;
    ++(operation.phase == Phase::kUploading ? stalled_uploads_ : stalled_downloads_);
    overdue->members.push_back({member.connection, LossReason::kTransferStalled, *std::move(why)});
  }
}

std::optional<Failure> Operations::FailureDue(const Operation& operation) const {
  if (operation.pending_failure_due <= batch_.now()) return operation.pending_failure;
  if (operation.phase == Phase::kReserving &&
      batch_.now() - operation.phase_since > operation.reserve_limit) {
    return ReserveSlow(operation.reserve_limit, config_.retry_after);
  }
  const absl::Duration idle = batch_.now() - operation.last_advance;
  const Limits& limits = config_.limits;
  if (operation.phase == Phase::kUploading && idle > limits.upload_idle_timeout) {
    return UploadIdle(limits.upload_idle_timeout);
  }
  if (operation.phase == Phase::kRunning &&
      batch_.now() - operation.run_since > operation.run_limit) {
    return RunTooLong(operation.run_limit, absl::Seconds(operation.run_seconds));
  }
  if (operation.phase == Phase::kDownloading && idle > limits.download_idle_timeout) {
    return DownloadIdle(limits.download_idle_timeout);
  }
  return std::nullopt;
}

Operations::Overdue Operations::CheckTimers() {
  Overdue overdue;
  for (auto& [id, operation] : operations_) {
    WatchMembers(operation);
    CheckMembers(operation, &overdue);
    if (operation.phase == Phase::kRunning && IsBehindAnother(operation)) {
      operation.run_since = batch_.now();
    }
    if (!operation.stream) continue;
    if (std::optional<Failure> why = FailureDue(operation)) {
      overdue.requests.emplace_back(*operation.stream, *std::move(why));
    }
  }
  return overdue;
}

void Operations::Forgive(absl::Duration pause) {
  for (auto& [connection, finished] : last_finished_) finished += pause;
  for (auto& [id, operation] : operations_) {
    operation.phase_since += pause;
    operation.run_sent += pause;
    operation.run_since += pause;
    operation.last_advance += pause;
    operation.pending_failure_due += pause;
    for (Member& member : operation.members) {
      if (member.stalled_since) *member.stalled_since += pause;
    }
  }
}

// --------------------------------------------------------------------- lookups

void Operations::Enter(Operation& operation, Phase phase) {
  operation.phase = phase;
  operation.phase_since = batch_.now();
  operation.last_advance = batch_.now();
  const bool is_watched = operation.bypasses_coordinator() &&
                          (phase == Phase::kUploading || phase == Phase::kDownloading);
  for (Member& member : operation.members) {
    member.stalled_since.reset();
    if (is_watched) member.stalled_since = batch_.now();
  }
}

Operations::MemberRef Operations::FindMember(ConnectionId connection,
                                             const std::string& operation_id, uint64_t generation) {
  Operation* operation = Find(operation_id);
  if (operation == nullptr || operation->generation != generation) return {};
  for (size_t rank = 0; rank < operation->members.size(); ++rank) {
    if (operation->members[rank].connection == connection) {
      return {operation, &operation->members[rank], static_cast<int>(rank)};
    }
  }
  return {};
}

Operation* Operations::Find(const std::string& id) {
  const auto found = operations_.find(id);
  return found == operations_.end() ? nullptr : &found->second;
}

const Operation* Operations::Find(const std::string& id) const {
  const auto found = operations_.find(id);
  return found == operations_.end() ? nullptr : &found->second;
}

std::vector<Site> Operations::SitesOf(const std::vector<ConnectionId>& members) const {
  std::vector<Site> sites(members.size());
  for (const auto& [id, operation] : operations_) {
    for (const Member& member : operation.members) {
      const auto found = std::find(members.begin(), members.end(), member.connection);
      if (found == members.end()) continue;
      Site& site = sites[found - members.begin()];
      if (member.memory != Memory::kReleased) site.reserved_bytes += member.bytes;
      ++site.operations;
      site.clients.insert(operation.client);
      site.largest_cost = std::max(site.largest_cost, operation.cost_seconds);
      site.computes |= operation.phase == Phase::kUploaded ||
                       (operation.phase == Phase::kRunning && !member.finished);
      if (!operation.is_express) continue;
      ++site.express_operations;
      site.express_clients.insert(operation.client);
    }
  }
  return sites;
}

std::set<std::string> Operations::ResidualsInUse() const {
  std::set<std::string> handles;
  for (const auto& [id, operation] : operations_) {
    if (!operation.residual.empty()) handles.insert(operation.residual);
  }
  return handles;
}

int64_t Operations::accepted_requests_on(ConnectionId connection) const {
  return std::count_if(operations_.begin(), operations_.end(), [connection](const auto& entry) {
    const Operation& operation = entry.second;
    return operation.stream.has_value() && operation.ends_with_ring() && operation.IsOn(connection);
  });
}

int64_t Operations::accepted_requests() const {
  return std::count_if(operations_.begin(), operations_.end(), [](const auto& entry) {
    return entry.second.stream.has_value() && entry.second.ends_with_ring();
  });
}

std::map<ConnectionId, int64_t> Operations::ReservedByWorker() const {
  std::map<ConnectionId, int64_t> reserved;
  for (const auto& [id, operation] : operations_) {
    for (const Member& member : operation.members) {
      if (member.memory != Memory::kReleased) reserved[member.connection] += member.bytes;
    }
  }
  return reserved;
}

double Operations::ComputedFraction(const Operation& operation) {
  double fraction = 1;
  for (const Member& member : operation.members) {
    if (!member.finished) fraction = std::min(fraction, member.fraction_done);
  }
  return fraction;
}

}  // namespace ringattn::server
