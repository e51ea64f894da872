// Operations: the order of runs, and which run waits for which.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"
#include "common/wire/proto_values.h"
#include "server/core/requests/client_failures.h"
#include "server/core/requests/operations.h"

namespace ringattn::server {
namespace {

using Phase = Operation::Phase;

bool HaveSameMembers(const Operation& a, const Operation& b) {
  return std::equal(a.members.begin(), a.members.end(), b.members.begin(), b.members.end(),
                    [](const auto& x, const auto& y) { return x.connection == y.connection; });
}

bool ShareMembers(const Operation& a, const Operation& b) {
  return std::any_of(a.members.begin(), a.members.end(),
                     [&](const auto& member) { return b.IsOn(member.connection); });
}

// Returns true while `other` runs on a worker of `operation`.
bool Occupies(const Operation& other, const Operation& operation) {
  if (other.phase != Phase::kRunning) return false;
  return std::any_of(other.members.begin(), other.members.end(), [&](const auto& member) {
    return !member.finished && operation.IsOn(member.connection);
  });
}

// `heartbeat` is a v1::Heartbeat, or the part of it for a run that preempts.
template <typename Heartbeat>
bool Names(const Heartbeat& heartbeat, const Operation& operation) {
  return heartbeat.operation_id() == operation.id && heartbeat.generation() == operation.generation;
}

// Returns true if the member's run has progressed since its last heartbeat.
template <typename Heartbeat>
bool Advance(const Heartbeat& heartbeat, Operation::Member& member) {
  member.fraction_done = heartbeat.fraction_done();
  const bool advanced = std::make_pair(heartbeat.step(), heartbeat.progress()) >
                        std::make_pair(member.step, member.progress);
  if (!advanced) return false;
  member.step = heartbeat.step();
  member.progress = heartbeat.progress();
  return true;
}

}  // namespace

// Starts operations that have all inputs, in order. An operation that must wait blocks later ones
// that share a member with it.
std::vector<StreamId> Operations::StartDueRuns() {
  std::map<StreamId, Operation*> waiting;
  std::vector<StreamId> streams;
  for (auto& [id, operation] : operations_) {
    if (operation.phase != Phase::kUploaded) continue;
    waiting[*operation.stream] = &operation;
    streams.push_back(*operation.stream);
  }
  order_.Sort(&streams);
  std::vector<StreamId> started;
  std::vector<const Operation*> held_up;
  for (StreamId stream : streams) {
    Operation& operation = *waiting.at(stream);
    operation.preempts = MayPreempt(operation);
    if (MayRun(operation, held_up)) {
      StartRun(operation);
      started.push_back(stream);
    } else {
      held_up.push_back(&operation);
    }
  }
  return started;
}

// Returns whether an operation that has just been placed may run at once. A long run takes the
// ordinary way, where a cheaper operation may still overtake it while it waits.
bool Operations::MayBeInline(Operation& operation) const {
  return absl::Seconds(operation.run_seconds) <= config_.preempting_run_max && MayRunNow(operation);
}

// Returns whether the worker may start the run without asking again. While it copies the inputs,
// other operations may become due that would go first, so only short runs may, and only if the
// worker copies at its own speed. REQUIRES: one member.
bool Operations::MayRunWhenUploaded(Operation& operation) const {
  return operation.path == Operation::Path::kClientMemory &&
         absl::Seconds(operation.run_seconds) <= config_.run_ahead_max && MayRunNow(operation);
}

// Returns whether the operation may run ahead of no other that waits for the same worker. Sets
// `preempts`.
bool Operations::MayRunNow(Operation& operation) const {
  std::vector<const Operation*> held_up;
  for (const auto& [id, other] : operations_) {
    if (other.phase == Phase::kUploaded) held_up.push_back(&other);
  }
  operation.preempts = MayPreempt(operation);
  if (MayRun(operation, held_up)) return true;
  operation.preempts = false;
  return false;
}

void Operations::SendInline(Operation& operation, const InlineTensors& inputs,
                            v1::Reserve* reserve) {
  operation.path = Operation::Path::kInline;
  v1::InlineRun* run = reserve->mutable_inline_run();
  for (const InlineData& input : inputs) {
    v1::InlineTensor* added = run->add_inputs();
    added->set_tensor(ToProto(input.tensor));
    added->set_data(input.bytes);
  }
  if (operation.preempts) SetDuration(config_.preempt_after, run->mutable_preempt_after());
  EnterRun(operation);
}

// The inputs may take longer than the run, as with MayRunWhenUploaded.
void Operations::SendInlineInMemory(Operation& operation, v1::Reserve* reserve) {
  operation.path = Operation::Path::kInlineMemory;
  v1::InlineRun* run = reserve->mutable_inline_run();
  if (operation.preempts) SetDuration(config_.preempt_after, run->mutable_preempt_after());
  EnterRun(operation);
}

// The worker needs more messages, and its run has not started. Returns false if the request has
// ended.
bool Operations::GoOnWithMessages(Operation& operation) {
  operation.path = Operation::Path::kClientMemory;
  operation.runs_when_uploaded = true;
  operation.run_sequence = 0;
  if (operation.stream) {
    order_.Return(operation.order_id);
    Enter(operation, Phase::kReserving);
    return true;
  }
  order_.Finish(operation.order_id, operation.planning_seconds);
  ReleaseAll(operation);
  return false;
}

// Its worker rejected the operation, which did not run.
void Operations::EndInline(Operation& operation) {
  for (Member& member : operation.members) member.finished = true;
  if (operation.stream) {
    order_.Return(operation.order_id);
  } else {
    order_.Finish(operation.order_id, operation.planning_seconds);
    Enter(operation, Phase::kReleasing);
  }
}

// Returns whether the operation is small, and a run on its worker would delay it for long. It still
// waits for its turn in the fair order: an operation that is held up blocks it like any other.
bool Operations::MayPreempt(const Operation& operation) const {
  if (operation.members.size() != 1 || !operation.may_preempt) return false;
  if (absl::Seconds(operation.run_seconds) > config_.preempting_run_max) return false;
  const double least = std::max(absl::ToDoubleSeconds(config_.preempt_after),
                                CoordinatorConfig::kPreemptingRatio * operation.run_seconds);
  return std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    const Operation& other = entry.second;
    return !other.preempts && other.run_seconds > least && Occupies(other, operation);
  });
}

// Workers execute runs in the order received, so an operation may be sent before the current run
// ends. It must not be sent too early, because a request that arrives meanwhile may go first. It
// must also not wait inside a ring exchange for a run that only some of its members execute,
// because that wait can exceed the transfer timeout.
bool Operations::MayRun(const Operation& operation,
                        const std::vector<const Operation*>& held_up) const {
  for (const Operation* other : held_up) {
    if (ShareMembers(*other, operation)) return false;
  }
  if (absl::Seconds(SecondsAhead(operation)) > config_.run_ahead_max) return false;
  if (operation.members.size() == 1) return true;
  return std::none_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    return !HaveSameMembers(entry.second, operation) && Precedes(entry.second, operation);
  });
}

// Returns the predicted seconds of runs on its busiest member before this one. Runs that preempt
// and other runs do not wait for each other.
double Operations::SecondsAhead(const Operation& operation) const {
  double most = 0;
  for (const Member& member : operation.members) {
    double seconds = 0;
    for (const auto& [id, other] : operations_) {
      if (other.phase != Phase::kRunning || other.preempts != operation.preempts) continue;
      for (const Member& theirs : other.members) {
        const bool computes = theirs.connection == member.connection && !theirs.finished;
        if (computes) seconds += other.run_seconds;
      }
    }
    most = std::max(most, seconds);
  }
  return most;
}

// All members receive Run in the same event, so any two operations run in the same order on all
// shared workers.
void Operations::StartRun(Operation& operation) {
  operation.run_wait = batch_.now() - operation.phase_since;
  EnterRun(operation);
  for (const Member& member : operation.members) {
    v1::Run* run = batch_.Send(member.connection)->mutable_run();
    run->set_operation_id(operation.id);
    run->set_generation(operation.generation);
    if (operation.preempts) SetDuration(config_.preempt_after, run->mutable_preempt_after());
  }
}

void Operations::EnterRun(Operation& operation) {
  operation.run_sequence = ++last_run_;
  Enter(operation, Phase::kRunning);
  operation.run_sent = operation.run_since = batch_.now();
  order_.Start(operation.order_id);
}

Operation* Operations::OnFinished(ConnectionId connection, v1::Finished finished,
                                  const std::string& worker_name, int generation_rank) {
  const MemberRef ref = FindMember(connection, finished.operation_id(), finished.generation());
  if (ref.operation == nullptr || ref.operation->phase != Phase::kRunning) return nullptr;
  Operation& operation = *ref.operation;
  Member& member = *ref.member;
  if (member.finished) return nullptr;
  member.report = std::move(*finished.mutable_report());
  member.device_seconds = DeviceSeconds(operation, member);
  member.finished = true;
  if (operation.preempts) {
    CountPause(connection, member.device_seconds);
  } else {
    last_finished_[connection] = batch_.now();
  }
  operation.last_advance = batch_.now();
  member.report.set_rank(ref.ring_rank);
  member.report.set_worker(worker_name);
  if (operation.is_inline()) TakeInline(operation, member, finished);
  if (!finished.ok() && operation.stream && !operation.pending_failure) {
    // A single member has no peer whose loss could be the cause.
    const bool alone = operation.members.size() == 1;
    FailLater(operation, ComputeFailed(generation_rank, worker_name, finished.reason()),
              alone ? absl::ZeroDuration() : config_.blame_window);
  }
  if (AllFinished(operation)) Charge(operation);
  return &operation;
}

// Returns the time from when the member was free until it finished, or until now, without pauses.
// A run that preempts waits on the worker for its time to come, and one in the client's memory for
// its copies, so only their kernels count.
double Operations::DeviceSeconds(const Operation& operation, const Member& member) const {
  if (member.finished) return member.device_seconds;
  const bool only_kernels = operation.preempts || operation.path == Operation::Path::kInlineMemory;
  if (only_kernels && member.report.has_compute_time()) {
    return absl::ToDoubleSeconds(ToDuration(member.report.compute_time()));
  }
  for (const auto& [id, other] : operations_) {
    if (other.preempts != operation.preempts) continue;
    if (other.phase != Phase::kRunning || other.run_sequence >= operation.run_sequence) continue;
    for (const Member& theirs : other.members) {
      if (theirs.connection == member.connection && !theirs.finished) return 0;
    }
  }
  const auto free = last_finished_.find(member.connection);
  const absl::Time since = free == last_finished_.end() || operation.preempts
                               ? operation.run_sent
                               : std::max(operation.run_sent, free->second);
  return std::max(0.0, absl::ToDoubleSeconds(batch_.now() - since) - member.paused_seconds);
}

// The run that computes on this worker paused for so long. The pause counts neither as its service
// nor towards its limits.
void Operations::CountPause(ConnectionId connection, double seconds) {
  seconds = std::min(seconds, absl::ToDoubleSeconds(kLongestPause));
  MemberRef paused;
  for (auto& [id, operation] : operations_) {
    if (operation.phase != Phase::kRunning || operation.preempts) continue;
    const bool is_later =
        paused.operation != nullptr && operation.run_sequence > paused.operation->run_sequence;
    for (Member& member : operation.members) {
      if (member.connection == connection && !member.finished && !is_later) {
        paused = {&operation, &member};
      }
    }
  }
  if (paused.operation == nullptr) return;
  const auto after_pause = [&](absl::Time time) {
    return std::min(batch_.now(), time + absl::Seconds(seconds));
  };
  paused.member->paused_seconds += seconds;
  paused.operation->run_since = after_pause(paused.operation->run_since);
  paused.operation->last_advance = after_pause(paused.operation->last_advance);
}

// All members are occupied until the slowest has finished its share of an exchange, so their times
// are summed. A cancelled run, or one ended by the loss of a worker, is charged until it stopped.
void Operations::Charge(const Operation& operation) {
  double used = operation.planning_seconds;
  for (const Member& member : operation.members) used += DeviceSeconds(operation, member);
  order_.Finish(operation.order_id, used);
}

bool Operations::AllFinished(const Operation& operation) {
  return std::all_of(operation.members.begin(), operation.members.end(),
                     [](const Member& member) { return member.finished; });
}

// ---------------------------------------------------------------- lost members

Operation* Operations::OnExchangeFailed(ConnectionId connection,
                                        const v1::GenerationFailed& failed) {
  const MemberRef ref = FindMember(connection, failed.operation_id(), failed.generation());
  if (ref.operation == nullptr || ref.operation->phase != Phase::kRunning) return nullptr;
  if (ref.member->finished || std::exchange(ref.member->exchange_failed, true)) return nullptr;
  return ref.operation;
}

bool Operations::HasFailedRun(const Operation& operation) {
  return std::any_of(operation.members.begin(), operation.members.end(),
                     [](const Member& member) { return member.exchange_failed; });
}

void Operations::FinishFailedRuns(Operation& operation) {
  if (operation.phase != Phase::kRunning) return;
  for (Member& member : operation.members) {
    if (member.exchange_failed && !member.finished) FinishMember(operation, member);
  }
}

void Operations::FinishMember(Operation& operation, Member& member) {
  member.device_seconds = DeviceSeconds(operation, member);
  member.finished = true;
  member.waits_for_peer = false;
  if (!operation.preempts) last_finished_[member.connection] = batch_.now();
  if (AllFinished(operation)) Charge(operation);
}

std::vector<std::string> Operations::OperationsOn(ConnectionId connection) const {
  std::vector<std::string> ids;
  for (const auto& [id, operation] : operations_) {
    if (operation.IsOn(connection)) ids.push_back(id);
  }
  return ids;
}

bool Operations::CopiesOn(ConnectionId connection) const {
  return std::any_of(operations_.begin(), operations_.end(), [connection](const auto& entry) {
    const Operation& operation = entry.second;
    return operation.may_write_to_client() && operation.IsOn(connection);
  });
}

void Operations::LoseMember(Operation& operation, ConnectionId connection) {
  for (Member& member : operation.members) {
    if (member.connection != connection) continue;
    operation.last_advance = batch_.now();  // the others learn of the loss
    if (operation.phase == Phase::kRunning && !member.finished) FinishMember(operation, member);
    member.memory = Operation::Memory::kReleased;
    member.stalled_since.reset();
  }
}

bool Operations::Outlives(const Operation& operation, ConnectionId lost) {
  return operation.stream && operation.ends_with_ring() && !operation.IsOn(lost) &&
         !HasFailedRun(operation);
}

// -------------------------------------------------------------------- progress

void Operations::OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat) {
  for (auto& [id, operation] : operations_) {
    for (Member& member : operation.members) {
      if (member.connection != connection) continue;
      const bool named = Names(heartbeat, operation);
      member.waits_for_peer = named && heartbeat.waits_for_peer();
      const bool advanced =
          (named && Advance(heartbeat, member)) ||
          (Names(heartbeat.preempting(), operation) && Advance(heartbeat.preempting(), member));
      if (advanced) operation.last_advance = batch_.now();
    }
  }
}

const Operation* Operations::FindStalledRun() {
  for (auto& [id, operation] : operations_) {
    if (operation.phase != Phase::kRunning) continue;
    if (IsBehindAnother(operation)) operation.last_advance = batch_.now();
    if (batch_.now() - operation.last_advance > operation.progress_timeout) return &operation;
  }
  return nullptr;
}

// Returns true while `later` waits for the end of `earlier` on a worker.
bool Operations::Precedes(const Operation& earlier, const Operation& later) const {
  const bool later_runs = later.run_sequence != 0;
  if (later_runs && earlier.run_sequence >= later.run_sequence) return false;
  return earlier.preempts == later.preempts && Occupies(earlier, later);
}

bool Operations::IsBehindAnother(const Operation& operation) const {
  return std::any_of(operations_.begin(), operations_.end(),
                     [&](const auto& entry) { return Precedes(entry.second, operation); });
}

std::vector<const Operation*> Operations::RootsOf(const std::set<std::string>& named) const {
  std::vector<const Operation*> implicated;
  for (const auto& [id, operation] : operations_) {
    if (operation.phase == Phase::kRunning && named.count(id) > 0) {
      implicated.push_back(&operation);
    }
  }
  for (size_t i = 0; i < implicated.size(); ++i) {  // grows during the loop
    for (const auto& [id, other] : operations_) {
      const bool known =
          std::find(implicated.begin(), implicated.end(), &other) != implicated.end();
      if (!known && Precedes(other, *implicated[i])) implicated.push_back(&other);
    }
  }
  std::vector<const Operation*> roots;
  for (const Operation* operation : implicated) {
    if (!IsBehindAnother(*operation)) roots.push_back(operation);
  }
  return roots;
}

}  // namespace ringattn::server
