#include "tests/simulation/sim_worker.h"

#include <algorithm>

#include "common/wire/durations.h"

namespace ringattn::server::simulation {
namespace {

constexpr absl::Duration kHeartbeatInterval = absl::Seconds(1);
constexpr absl::Duration kKeptLease = absl::Seconds(3);
constexpr int64_t kKeptShare = 4;  // of the memory

int64_t ResidualBytes(const v1::Reserve& reserve) {
  return 32 + 8 * static_cast<int64_t>(reserve.shape().seq_len_q()) / reserve.members_size();
}

// Returns everything that an operation depends on, and its principal.
std::string RecipeOf(v1::Reserve reserve) {
  reserve.clear_operation_id();
  reserve.clear_request_id();
  reserve.clear_traceparent();
  reserve.clear_token();
  reserve.clear_inline_run();
  reserve.clear_prepare_only();
  return reserve.SerializeAsString();
}

}  // namespace

SimWorker::SimWorker(World* world, ControlPlane* control, FindPeer find_peer, std::string name,
                     WorkerTraits traits)
    : world_(world),
      control_(control),
      find_peer_(std::move(find_peer)),
      name_(std::move(name)),
      traits_(traits),
      kept_({.max_count = 4, .max_bytes = traits.memory_bytes / kKeptShare, .lease = kKeptLease}) {
  SimKvRanks::Host host;
  host.later = [this](absl::Duration delay, std::function<void()> callback) {
    Later(delay, std::move(callback));
  };
  host.say = [this](const v1::JoinRequest& message) {
    if (connection_ != 0) Say(message);
  };
  host.connected = [this] { return connection_ != 0; };
  host.changed = [this](const std::string& cache) {
    if (on_kv_change_) on_kv_change_(cache);
  };
  world->network.host_of[name_] = traits_.host;
  kv_ = std::make_unique<SimKvRanks>(world, std::move(host), traits.memory_bytes / 2,
                                     traits.kv_orphan_time);
}

std::string SimWorker::blob() const { return absl::StrCat(name_, "#", process_); }

// Runs in this process: not after its end, and late if it is stopped.
void SimWorker::Later(absl::Duration delay, std::function<void()> callback) {
  world_->scheduler.After(delay, [this, callback, process = process_] {
    if (!alive_ || process != process_) return;
    if (stopped_) {
      backlog_.push_back(callback);
    } else {
      callback();
    }
  });
}

void SimWorker::Launch() {
  if (alive_) return;
  alive_ = true;
  ++process_;
  world_->Trace(name_, " starts");
  Dial();
  Heartbeats();
}

void SimWorker::Dial() {
  v1::Register registration;
  registration.set_name(name_);
  registration.set_incarnation(absl::StrCat(process_));
  registration.mutable_location()->set_host(traits_.host);
  registration.set_probe_address(name_);
  registration.set_preempts(true);
  registration.set_runs_inline(true);
  registration.set_data_address(name_ + ":1");
  registration.set_client_data_address(name_ + ":2");
  registration.set_local_socket(name_ + ".sock");
  if (traits_.reports_memory) registration.set_memory_bytes(traits_.memory_bytes);
  v1::KernelRate* rate = registration.add_kernel_rates();
  rate->set_family("simulated");
  rate->add_dtypes(v1::DATA_TYPE_FLOAT32);
  rate->set_flops_per_second(traits_.flops_per_second);
  kv_->AddTo(&registration);
  heartbeat_sequence_ = 0;
  connection_ = control_->Dial(this, registration);
}

void SimWorker::Kill(bool silently) {
  if (!alive_) return;
  world_->Trace(name_, silently ? " loses power" : " is killed");
  faulty_processes_.insert(process_);
  if (!silently) LeaveRing();
  alive_ = stopped_ = stuck_ = false;
  backlog_.clear();
  control_->HangUp(connection_, silently);
  connection_ = 0;
  residuals_.clear();
  kv_->Clear();
  operations_.clear();
  ForgetKept();
  ForgetRuns();
  blobs_.clear();
  broken_peers_.clear();
  generation_ = 0;
  committed_ = broken_ = false;
}

void SimWorker::Stop() {
  if (!alive_) return;
  world_->Trace(name_, " is stopped");
  faulty_processes_.insert(process_);
  stopped_ = true;
}

void SimWorker::Resume() {
  if (!stopped_) return;
  world_->Trace(name_, " goes on");
  stopped_ = false;
  for (const std::function<void()>& callback : std::exchange(backlog_, {})) {
    if (alive_) callback();
  }
}

void SimWorker::Heartbeats() {
  CheckKept();
  if (connection_ != 0) {
    v1::JoinRequest message;
    v1::Heartbeat* heartbeat = message.mutable_heartbeat();
    heartbeat->set_sequence(++heartbeat_sequence_);
    heartbeat->set_reserved_bytes(reserved_bytes());
    const auto found = operations_.find(running_);
    if (found != operations_.end()) {
      heartbeat->set_operation_id(running_);
      heartbeat->set_generation(generation_);
      heartbeat->set_step(found->second.step);
      heartbeat->set_progress(found->second.progress);
      heartbeat->set_waits_for_peer(found->second.waits);
    }
    const auto preempting = operations_.find(preempting_);
    if (preempting != operations_.end()) {
      heartbeat->mutable_preempting()->set_operation_id(preempting_);
      heartbeat->mutable_preempting()->set_generation(generation_);
      heartbeat->mutable_preempting()->set_step(preempting->second.step);
      heartbeat->mutable_preempting()->set_progress(preempting->second.progress);
    }
    Say(message);
  }
  Later(kHeartbeatInterval, [this] { Heartbeats(); });
}

int64_t SimWorker::reserved_bytes() const {
  int64_t bytes = 0;
  for (const auto& [id, operation] : operations_) bytes += operation.bytes;
  for (const auto& [id, kept] : residuals_) bytes += kept;
  return bytes + kv_->bytes();
}

void SimWorker::OnMessage(ConnectionId connection, uint64_t process,
                          const v1::JoinResponse& message) {
  if (!alive_ || process != process_) return;
  Later(absl::ZeroDuration(), [this, connection, message] {
    if (connection != connection_ || kv_->OnMessage(message)) return;
    switch (message.message_case()) {
      case v1::JoinResponse::kPrepare:
        return OnPrepare(message.prepare());
      case v1::JoinResponse::kCommit:
        return OnCommit(message.commit());
      case v1::JoinResponse::kProbe:
        return OnProbe(message.probe());
      case v1::JoinResponse::kTeardown:
        return OnTeardown(message.teardown());
      case v1::JoinResponse::kLosePeer:
        return OnLosePeer(message.lose_peer());
      case v1::JoinResponse::kReserve:
        return OnReserve(message.reserve());
      case v1::JoinResponse::kRun:
        return OnRun(message.run());
      case v1::JoinResponse::kCancel:
        return OnCancel(message.cancel());
      case v1::JoinResponse::kRelease:
        return OnRelease(message.release());
      case v1::JoinResponse::kDropResiduals:
        return OnDropResiduals(message.drop_residuals());
      case v1::JoinResponse::kExpectRegion:
        return OnExpectRegion(message.expect_region());
      default:
        return;
    }
  });
}

void SimWorker::OnStreamClosed(ConnectionId connection, uint64_t process) {
  if (!alive_ || process != process_ || connection != connection_) return;
  connection_ = 0;
  Later(absl::ZeroDuration(), [this] {
    world_->Trace(name_, " lost its control stream");
    if (stuck_) return Kill(/*silently=*/false);  // cannot free what is stuck
    FreeEverything();
    residuals_.clear();
    kv_->OnOrphaned();
    Later(world_->random.Between(absl::Milliseconds(100), absl::Seconds(1)), [this] {
      if (connection_ == 0) Dial();
    });
  });
}

void SimWorker::FreeEverything() {
  LeaveRing();
  operations_.clear();
  ForgetKept();
  ForgetRuns();
  generation_ = 0;
  committed_ = broken_ = false;
  blobs_.clear();
  broken_peers_.clear();
}

void SimWorker::ForgetKept() {
  kept_.Clear();
  held_until_.clear();
  prepared_.clear();
}

void SimWorker::ForgetRuns() {
  runs_.clear();
  running_.clear();
  preempting_runs_.clear();
  preempting_.clear();
  paused_ = false;
}

// --- operations

void SimWorker::OnReserve(const v1::Reserve& reserve) {
  if (reserve.generation() != generation_ || (!committed_ && !broken_)) {
    return world_->Violate(name_, ": Reserve in a generation that is not formed");
  }
  const std::string& id = reserve.operation_id();
  v1::JoinRequest message;
  v1::Reserved* answer = message.mutable_reserved();
  answer->set_operation_id(id);
  answer->set_generation(generation_);
  int64_t bytes =
      64 + 16 * reserve.shape().seq_len_q() / reserve.members_size() + traits_.workspace_bytes;
  if (!reserve.residual().empty()) {
    const auto residual = residuals_.find(reserve.residual());
    if (residual == residuals_.end()) {
      return world_->Violate(name_, ": ", id, " reads ", reserve.residual(), ", which is not here");
    }
    bytes -= residual->second;
  }
  answer->set_workspace_bytes(traits_.workspace_bytes);
  if (reserve.has_prepare_only()) return PrepareOnly(reserve, bytes, std::move(message));
  TakeKept(reserve, bytes);
  if (reserved_bytes() + bytes > traits_.memory_bytes ||
      (world_->weather != Weather::kCalm && world_->random.OneIn(40))) {
    answer->set_reason("no memory");
    return Say(message);
  }
  Operation& operation = operations_[id];
  operation.reserve = reserve;
  operation.bytes = bytes;
  for (int i = 0; i < reserve.members_size(); ++i) {
    const size_t rank = reserve.members(i);
    if (rank < blobs_.size() && blobs_[rank] == blob()) operation.ring_rank = i;
  }
  answer->set_ok(true);
  answer->set_bytes(bytes);
  if (reserve.retain()) answer->set_residual_bytes(ResidualBytes(reserve));
  // The copies of some need staging memory.
  const bool is_inline =
      reserve.has_inline_run() && (reserve.places().empty() || !world_->random.OneIn(3));
  if (is_inline) return RunInline(id, *answer);
  Say(message);
  const bool empty = operation.ring_rank >= static_cast<int64_t>(reserve.shape().seq_len_q());
  if (empty) return FinishUpload(id, process_);
  if (!std::exchange(stop_reading_next_, false)) return;
  world_->Trace(name_, " does not read ", id);
  operation.reads = false;
  faulty_processes_.insert(process_);
}

void SimWorker::RunInline(const std::string& id, const v1::Reserved& reserved) {
  Operation& operation = operations_.at(id);
  const v1::InlineRun& inline_run = operation.reserve.inline_run();
  const bool in_memory = !operation.reserve.places().empty();
  if (operation.world_size() != 1 || inline_run.inputs().empty() != in_memory ||
      operation.reserve.retain()) {
    return world_->Violate(name_, ": ", id, " must not be inline");
  }
  operation.uploaded = true;
  operation.inline_reserved = reserved;
  RunUploaded(id);
}

// Starts a run that needs no message.
void SimWorker::RunUploaded(const std::string& id) {
  const v1::Reserve& reserve = operations_.at(id).reserve;
  v1::Run run;
  run.set_operation_id(id);
  if (reserve.inline_run().has_preempt_after()) {
    *run.mutable_preempt_after() = reserve.inline_run().preempt_after();
  } else if (reserve.run_when_uploaded().has_preempt_after()) {
    *run.mutable_preempt_after() = reserve.run_when_uploaded().preempt_after();
  }
  OnRun(run);
}

void SimWorker::OnExpectRegion(const v1::ExpectRegion& expect) {
  if (world_->random.OneIn(20)) return;  // its client does not come
  Later(world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(100)),
        [this, id = expect.region_id()] {
          if (connection_ == 0) return;
          v1::JoinRequest message;
          message.mutable_region_changed()->set_region_id(id);
          message.mutable_region_changed()->set_attached(true);
          Say(message);
        });
}

bool SimWorker::WritesFor(const std::string& request_id) const {
  return std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    const Operation& operation = entry.second;
    return operation.reserve.request_id() == request_id && !operation.reserve.places().empty() &&
           (operation.run || operation.runs_when_uploaded());
  });
}

void SimWorker::PrepareOnly(const v1::Reserve& reserve, int64_t bytes, v1::JoinRequest message) {
  v1::Reserved* answer = message.mutable_reserved();
  if (reserve.retain() || !reserve.residual().empty() || reserve.has_inline_run() ||
      !reserve.token().empty() || !reserve.places().empty()) {
    return world_->Violate(name_, ": ", reserve.operation_id(), " must not be prepared only");
  }
  prepared_.insert(reserve.operation_id());
  const std::string recipe = RecipeOf(reserve);
  const absl::Time until = world_->now() + ToDuration(reserve.prepare_only().ttl());
  const bool in_use = std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    return RecipeOf(entry.second.reserve) == recipe;
  });
  const bool found = kept_.Hold(recipe, until).has_value() || in_use;
  held_until_[recipe] = std::max(held_until_[recipe], until);
  answer->set_found(found);
  answer->set_ok(found);
  answer->set_bytes(bytes);
  if (found) return Say(message);
  if (bytes > traits_.memory_bytes / kKeptShare) {
    answer->set_not_kept(true);
    answer->set_reason("too large to be kept");
    return Say(message);
  }
  GiveWay(bytes);
  if (reserved_bytes() + bytes > traits_.memory_bytes ||
      (world_->weather != Weather::kCalm && world_->random.OneIn(40))) {
    answer->set_reason("no memory");
    return Say(message);
  }
  kept_.Keep(recipe, bytes, {reserve.principal(), generation_, world_->now(), bytes},
             world_->now());
  answer->set_ok(true);
  Say(message);
}

void SimWorker::TakeKept(const v1::Reserve& reserve, int64_t bytes) {
  const std::optional<Kept> kept = kept_.Take(RecipeOf(reserve), world_->now());
  if (kept.has_value()) {
    const auto held = held_until_.find(RecipeOf(reserve));
    const absl::Time expires = std::max(
        kept->since + kKeptLease, held == held_until_.end() ? absl::InfinitePast() : held->second);
    if (kept->principal != reserve.principal() || kept->generation != generation_ ||
        kept->bytes != bytes || world_->now() >= expires) {
      world_->Violate(name_, ": ", reserve.operation_id(), " takes what is not its own");
    }
  }
  GiveWay(bytes);
}

void SimWorker::GiveWay(int64_t bytes) {
  const int64_t most = traits_.memory_bytes - reserved_bytes() - bytes;
  if (kept_.bytes() > most) kept_.Evict(kept_.bytes() - most);
}

void SimWorker::Keep(const Operation& operation) {
  const v1::Reserve& reserve = operation.reserve;
  if (!operation.ended_well || reserve.retain() || !reserve.residual().empty()) return;
  kept_.Keep(RecipeOf(reserve), operation.bytes,
             {reserve.principal(), generation_, world_->now(), operation.bytes}, world_->now());
}

void SimWorker::CheckKept() {
  kept_.Expire(world_->now());
  GiveWay(0);
  if (generation_ == 0 && kept_.count() > 0) {
    world_->Violate(name_, " keeps operations without a ring");
  }
}

bool SimWorker::Reads(const std::string& operation_id) const {
  const auto found = operations_.find(operation_id);
  return found == operations_.end() || found->second.reads;
}

bool SimWorker::Sends(const std::string& operation_id) const {
  const auto found = operations_.find(operation_id);
  return found == operations_.end() || found->second.sends;
}

bool SimWorker::Holds(const std::string& operation_id, uint64_t process) const {
  return alive_ && process == process_ && operations_.count(operation_id) > 0;
}

void SimWorker::FinishUpload(const std::string& operation_id, uint64_t process) {
  if (process != process_) return;
  Later(absl::ZeroDuration(), [this, operation_id] {
    const auto found = operations_.find(operation_id);
    if (found == operations_.end() || found->second.uploaded) return;
    found->second.uploaded = true;
    v1::JoinRequest message;
    message.mutable_uploaded()->set_operation_id(operation_id);
    message.mutable_uploaded()->set_generation(generation_);
    Say(message);
    if (found->second.runs_when_uploaded()) RunUploaded(operation_id);
  });
}

void SimWorker::SayTransfer(const std::string& operation_id, uint64_t process,
                            const v1::TransferProgress& progress) {
  if (!Holds(operation_id, process)) return;
  Later(absl::ZeroDuration(), [this, operation_id, progress] {
    v1::JoinRequest message;
    *message.mutable_transfer_progress() = progress;
    message.mutable_transfer_progress()->set_operation_id(operation_id);
    message.mutable_transfer_progress()->set_generation(generation_);
    Say(message);
  });
}

void SimWorker::SayDelivered(const std::string& operation_id, uint64_t process) {
  if (!Holds(operation_id, process)) return;
  Later(absl::ZeroDuration(), [this, operation_id] {
    v1::JoinRequest message;
    message.mutable_delivered()->set_operation_id(operation_id);
    message.mutable_delivered()->set_generation(generation_);
    Say(message);
  });
}

void SimWorker::OnRun(const v1::Run& run) {
  const auto found = operations_.find(run.operation_id());
  if (found == operations_.end() || !found->second.uploaded || found->second.run) {
    return world_->Violate(name_, ": Run of ", run.operation_id(), " before Uploaded or twice");
  }
  found->second.run = true;
  if (!run.has_preempt_after()) {
    runs_.push_back(run.operation_id());
    return StartNext();
  }
  found->second.preempt_after = ToDuration(run.preempt_after());
  preempting_runs_.push_back(run.operation_id());
  StartPreempting();
}

void SimWorker::OnCancel(const v1::Cancel& cancel) {
  const auto found = operations_.find(cancel.operation_id());
  if (found == operations_.end()) return;
  if (!found->second.run && !found->second.runs_when_uploaded()) {
    return world_->Violate(name_, ": Cancel of what does not run");
  }
  found->second.cancelled = true;
}

void SimWorker::OnRelease(const v1::Release& release) {
  const auto found = operations_.find(release.operation_id());
  if (found == operations_.end() && prepared_.count(release.operation_id()) == 0) return;
  v1::JoinRequest answer;
  answer.mutable_released()->set_operation_id(release.operation_id());
  answer.mutable_released()->set_generation(generation_);
  if (found == operations_.end()) return Say(answer);  // the request has ended before Reserved
  if (found->second.inline_reserved && !broken_) {
    return world_->Violate(name_, ": Release of ", release.operation_id(), ", which is inline");
  }
  if (found->second.run && !found->second.finished && !broken_) {
    if (!found->second.runs_when_uploaded()) {
      return world_->Violate(name_, ": Release of ", release.operation_id(), " while it runs");
    }
    if (stuck_ && IsRunning(release.operation_id())) return;
    StopRun(release.operation_id());
  }
  if (release.keep_residual()) {
    if (!found->second.finished || !found->second.reserve.retain()) {
      return world_->Violate(name_, ": ", release.operation_id(), " has nothing to keep");
    }
    residuals_[release.operation_id()] = ResidualBytes(found->second.reserve);
  }
  Keep(found->second);
  operations_.erase(found);
  Say(answer);
}

void SimWorker::OnDropResiduals(const v1::DropResiduals& drop) {
  for (const std::string& id : drop.operation_ids()) {
    if (residuals_.erase(id) == 0) world_->Violate(name_, ": ", id, " left nothing to drop");
  }
}

}  // namespace ringattn::server::simulation
