// Coordinator: events from control streams, and the detection of lost workers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"
#include "common/wire/join_status.h"
#include "server/core/coordinator_impl.h"
#include "server/core/loss/blame.h"
#include "server/core/requests/client_failures.h"
#include "server/core/ring/registration_rules.h"

namespace ringattn::server {

using Phase = Operation::Phase;

namespace {

// Returns the reason to reject the worker; empty if it may join.
std::string CheckJoin(const v1::Register& registration, const std::string& version) {
  std::string why = CheckRegistration(registration);
  if (!why.empty()) return why;
  if (version.empty() || registration.version() == version) return "";
  return absl::StrCat("version ", registration.version(), " does not match the coordinator's ",
                      version);
}

}  // namespace

void Coordinator::Impl::On(const WorkerJoined& event) {
  if (roster_.Has(event.connection)) return;
  const std::string refusal = CheckJoin(event.registration, config_.version);
  if (!refusal.empty()) {
    v1::Leave* leave = batch_.Send(event.connection)->mutable_leave();
    leave->set_reason(refusal);
    leave->set_exit(true);
    return batch_.Emit(DropWorker{event.connection, refusal});
  }
  // The earlier process of this name has exited or is about to notice that its stream broke.
  for (ConnectionId replaced : roster_.Named(event.registration.name())) {
    batch_.Send(replaced)->mutable_leave()->set_reason(kNameJoinedAgain);
    LoseWorker(replaced, LossReason::kReplaced, kNameJoinedAgain, /*drop=*/true);
  }
  roster_.Add(event.connection, event.registration, batch_.now());
  kv_caches_.Adopt(event.connection, event.registration);
  topology_changed_ = true;
  SetDuration(config_.heartbeat_interval,
              batch_.Send(event.connection)->mutable_registered()->mutable_heartbeat_interval());
}

void Coordinator::Impl::On(const WorkerDisconnected& event) {
  LoseWorker(event.connection, LossReason::kDisconnected, "its control stream closed",
             /*drop=*/false);
}

void Coordinator::Impl::On(WorkerMessage& event) {
  if (!roster_.Heard(event.connection, std::min(event.received, batch_.now()))) return;
  v1::JoinRequest& message = event.message;
  switch (message.message_case()) {
    case v1::JoinRequest::kHeartbeat:
      return OnHeartbeat(event.connection, message.heartbeat());
    case v1::JoinRequest::kPrepared:
      return ring_.OnPrepared(event.connection, message.prepared());
    case v1::JoinRequest::kCommitted:
      if (ring_.OnCommitted(event.connection, message.committed())) {
        roster_.TakeMeasurements(event.connection, message.committed());
      }
      return;
    case v1::JoinRequest::kTornDown:
      return ring_.OnTornDown(event.connection, message.torn_down());
    case v1::JoinRequest::kReserved:
      return OnReserved(event.connection, message.reserved());
    case v1::JoinRequest::kUploaded:
      return OnUploaded(event.connection, message.uploaded());
    case v1::JoinRequest::kFinished:
      return OnFinished(event.connection, std::move(*message.mutable_finished()));
    case v1::JoinRequest::kReleased:
      return operations_.OnReleased(event.connection, message.released());
    case v1::JoinRequest::kGenerationFailed:
      return OnGenerationFailed(event.connection, message.generation_failed());
    case v1::JoinRequest::kTransferProgress:
      return OnTransferProgress(event.connection, message.transfer_progress());
    case v1::JoinRequest::kDelivered:
      return OnDelivered(event.connection, message.delivered());
    case v1::JoinRequest::kRegionChanged:
      return regions_.OnChanged(event.connection, message.region_changed());
    case v1::JoinRequest::kKvReserved:
      return kv_caches_.OnReserved(event.connection, message.kv_reserved());
    case v1::JoinRequest::kKvOpened:
      return kv_caches_.OnOpened(event.connection, message.kv_opened());
    case v1::JoinRequest::kKvSettled:
      return kv_caches_.OnSettled(event.connection, message.kv_settled());
    case v1::JoinRequest::kKvTouched:
      return kv_caches_.OnTouched(event.connection, message.kv_touched());
    case v1::JoinRequest::kProbed:
      return ring_.reach().OnProbed(event.connection, message.probed());
    case v1::JoinRequest::kLeaving:
      roster_.SetLeaving(event.connection);
      kv_caches_.OnWorkerLeaving(event.connection, roster_.NameOf(event.connection));
      topology_changed_ = true;
      return;
    case v1::JoinRequest::kRegister:  // sent only once, as WorkerJoined
    case v1::JoinRequest::MESSAGE_NOT_SET:
      return;
  }
}

void Coordinator::Impl::On(const ReformRequested&) {
  ring_.AskReform();
  if (!roster_.empty() && ring_.has_operations()) {
    EndGeneration(RingEnded("an operator asked for a new one", config_.retry_after));
  }
}

void Coordinator::Impl::OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat) {
  if (roster_.TakeHeartbeat(connection, heartbeat)) {
    operations_.OnHeartbeat(connection, heartbeat);
  }
}

void Coordinator::Impl::OnGenerationFailed(ConnectionId connection,
                                           const v1::GenerationFailed& failed) {
  if (failed.generation() != ring_.generation() || !ring_.RankOf(connection)) return;
  if (ring_.has_operations()) {
    Operation* operation = operations_.OnExchangeFailed(connection, failed);
    if (ring_.ending()) {
      if (operation != nullptr) OnExchangeFailed(*operation);
      return;
    }
    suspicion_.Report(connection, failed, ring_, roster_, batch_.now(), config_.blame_window);
  } else {
    ring_.OnFormingFailed(connection, failed);
  }
}

void Coordinator::Impl::OnReserved(ConnectionId connection, const v1::Reserved& reserved) {
  using Kind = Operations::ReserveResult::Kind;
  const Operations::ReserveResult result = operations_.OnReserved(connection, reserved);
  if (result.kind == Kind::kAllReserved) Accept(*result.operation);
  if (result.kind == Kind::kAllPrepared) ConcludePreparation(*result.operation);
  if (result.kind == Kind::kRefused) {
    Refuse(*result.operation, *result.member, reserved);
    if (Operation* refused = operations_.Find(reserved.operation_id())) {
      operations_.EraseIfReleased(*refused);
    }
  }
}

void Coordinator::Impl::OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded) {
  const Operation* running = operations_.OnUploaded(connection, uploaded);
  if (running == nullptr) return;
  Request& request = *requests_.Find(*running->stream);
  request.run_at = batch_.now();
  requests_.SetState(request, v1::REQUEST_STATE_COMPUTING);
}

void Coordinator::Impl::OnFinished(ConnectionId connection, v1::Finished finished) {
  const std::optional<int> rank = ring_.RankOf(connection);
  if (!rank) return;
  Operation* operation =
      operations_.OnFinished(connection, std::move(finished), roster_.NameOf(connection), *rank);
  if (operation == nullptr) return;
  // The loss of another member may explain the failure of an exchange.
  if (ring_.ending() && operation->stream && MayBeExplainedByLoss(*operation)) {
    return EndRequest(*operation->stream, loss_failure_);
  }
  ConcludeRun(*operation);
}

void Coordinator::Impl::OnTransferProgress(ConnectionId connection,
                                           const v1::TransferProgress& progress) {
  const Operations::Transferred moved = operations_.OnTransferProgress(connection, progress);
  if (moved.operation == nullptr) return;
  Operation& operation = *moved.operation;
  const StreamId stream = *operation.stream;
  TransferAdvanced advanced{stream};
  for (const Operation::Member& member : operation.members) {
    advanced.received_bytes += static_cast<int64_t>(member.received_bytes);
    advanced.sent_bytes += static_cast<int64_t>(member.sent_bytes);
    advanced.waits_for_client |= member.waits_for_client;
  }
  batch_.Emit(advanced);
  const int rank = ring_.RankOf(connection).value_or(-1);
  if (progress.region_released()) {
    const Request* const request = requests_.Find(stream);
    const bool has_writers = request != nullptr && !request->arrived.transport.writers.empty();
    const std::string& name = roster_.NameOf(connection);
    return EndRequest(stream,
                      has_writers ? WriterReleasedRegion(rank, name) : RegionReleased(rank, name));
  }
  if (!progress.bad_chunk().empty()) {
    return EndRequest(stream,
                      BadShardChunk(rank, roster_.NameOf(connection), progress.bad_chunk()));
  }
  if (!progress.failure().empty() && !operation.pending_failure) {
    operations_.FailLater(
        operation,
        TransferFailed(rank, roster_.NameOf(connection), progress.failure(), config_.retry_after),
        config_.blame_window);
  }
}

void Coordinator::Impl::OnDelivered(ConnectionId connection, const v1::Delivered& delivered) {
  Operation* operation = operations_.OnDelivered(connection, delivered);
  // While the run has not ended on all members, ConcludeRun finishes the download.
  if (operation != nullptr && operation->stream && operation->phase == Phase::kDownloading) {
    FinishDownload(*operation);
  }
}

// ------------------------------------------------------------------------ time

void Coordinator::Impl::AdvanceRing() {
  ConcludeEnding();
  const RingPhase before = ring_.phase();
  const char* what = "";
  for (ConnectionId connection : ring_.Overdue(&what)) {
    LoseWorker(connection, LossReason::kNoAnswer, what, /*drop=*/true);
  }
  DismissLeavers();
  // The next ring waits until it is known which workers died with their host, and which hosts reach
  // each other.
  const bool settled = host_losses_.Settled() && ring_.reach().Settled();
  if (ring_.phase() == RingPhase::kGathering && !settled) return;
  if (ring_.phase() == before) ring_.Advance(operations_.empty(), !suspicion_.open());
}

// Dismisses leaving workers outside every ring, including rings that form or tear down, before the
// next ring could include them.
void Coordinator::Impl::DismissLeavers() {
  for (ConnectionId connection : roster_.Leaving()) {
    // Its writers go on until it closes its stream. The ring takes no leaving workers.
    if (ring_.RankOf(connection) || kv_caches_.CachesOn(connection) > 0) continue;
    v1::Leave* leave = batch_.Send(connection)->mutable_leave();
    leave->set_reason("it asked to leave");
    leave->set_exit(true);
    roster_.Remove(connection);
    regions_.OnWorkerLost(connection);
    topology_changed_ = true;
    EndReaders(residuals_.OnWorkerLost(connection), ResidualEnd::kLost);
  }
}

void Coordinator::Impl::CheckSilence() {
  const absl::Time now = batch_.now();
  // The longest silent worker is blamed first.
  for (ConnectionId connection : roster_.SilentSince(now - config_.heartbeat_timeout)) {
    if (!roster_.Has(connection)) continue;
    const absl::Duration silence = now - roster_.at(connection).last_heard;
    LoseWorker(connection, LossReason::kSilent,
               absl::StrCat("silent for ", absl::FormatDuration(silence)), /*drop=*/true);
  }
}

void Coordinator::Impl::CheckSuspicion() {
  if (!suspicion_.IsDue(batch_.now())) return;
  const std::vector<RankState> ranks =
      suspicion_.Evidence(ring_, roster_, operations_, batch_.now());
  const std::string first_report = absl::StrCat("first report from ", suspicion_.first_report());
  const std::optional<int> rank = RankToBlame(ranks);
  const bool silent = rank && ranks[*rank].silent;
  // All ranks are alive, so a link may have failed.
  if (!silent) ring_.reach().Suspect(ring_.members());
  if (!rank) return EndGeneration(RingEnded(first_report, config_.retry_after));
  const ConnectionId blamed = ring_.members()[*rank];
  const std::string detail = absl::StrCat(silent ? "silent" : "stalled", "; ", first_report);
  const Failure failure = LostFailure(blamed, detail);
  const LossReason reason = silent ? LossReason::kSilent : LossReason::kStuck;
  host_losses_.Add(NoteLoss(blamed, reason, detail, OthersRunOn(blamed)), /*host=*/"");
  LoseMember(blamed, failure);
}

void Coordinator::Impl::CheckRuns() {
  if (suspicion_.open()) return;
  const Operation* operation = operations_.FindStalledRun();
  if (operation == nullptr) return;
  const std::string what =
      absl::StrCat("no progress for ", absl::FormatDuration(batch_.now() - operation->last_advance),
                   " in operation ", operation->id);
  const std::optional<int> rank = RankToBlame(RankStatesOf(*operation, ring_));
  if (rank) return LoseWorker(ring_.members()[*rank], LossReason::kStuck, what, /*drop=*/true);
  ring_.reach().Suspect(ring_.members());
  EndGeneration(
      RingEnded(absl::StrCat(what, ": every rank waits for another"), config_.retry_after));
}

void Coordinator::Impl::CheckOperations() {
  const Operations::Overdue overdue = operations_.CheckTimers();
  for (const Operations::LateMember& late : overdue.members) {
    LoseWorker(late.connection, late.reason, late.detail, /*drop=*/true);
  }
  for (const auto& [stream, failure] : overdue.requests) EndRequest(stream, failure);
}

}  // namespace ringattn::server
