#include "worker/service/worker_core.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/observability/log.h"
#include "common/process/descriptors.h"
#include "common/wire/durations.h"
#include "worker/comm/reach/probe_peers.h"
#include "worker/service/run_report.h"
#include "worker/service/slowdown.h"

namespace ringattn::worker {
namespace {

// The parts of the coordinator's limit on Commit in which a worker connects and measures, and in
// which it finds out whom it cannot reach. The rest, 2 of 10 s, is for messages on their way.
constexpr double kFormingShare = 0.65;
constexpr double kProbeShare = 0.15;
// If the coordinator has no limit.
constexpr absl::Duration kLongestProbe = absl::Seconds(2);

RingMemberOptions RingOptions(const WorkerCoreOptions& options) {
  RingMemberOptions ring = options.ring;
  ring.memory_limit_bytes = options.memory_limit_bytes;
  return ring;
}

KeptOperations::Bounds KeptBounds(const WorkerCoreOptions& options) {
  const bool keeps = options.prepared_lease > absl::ZeroDuration();
  return {keeps ? kMaxKeptOperations : 0,
          static_cast<int64_t>(options.memory_limit_bytes / kKeptMemoryDivisor),
          options.prepared_lease};
}

}  // namespace

WorkerCore::WorkerCore(WorkerCoreOptions options, Device* device, RingTransport* transport,
                       WorkerMetrics* metrics, std::function<void(v1::JoinRequest)> send,
                       std::function<void(const std::string&)> on_stuck)
    : options_(std::move(options)),
      send_(std::move(send)),
      metrics_(metrics),
      budget_(options_.memory_limit_bytes),
      device_(device, &probe_),
      kept_(KeptBounds(options_)),
      kv_store_({.max_bytes = options_.max_kv_cache_bytes, .orphan_time = options_.kv_orphan_time},
                &device_, &budget_, send_),
      watchdog_(std::move(on_stuck)),
      registry_(
          &device_, &budget_, [this](const OperationInfo& info) { OnReleased(info); }, &kept_),
      runner_(
          &device_,
          [this](ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
                 const RunningOperation& last) { OnRunDone(operation, result, last); },
          [this](absl::Duration paused) { metrics_->CountPreemption(paused); }),
      ring_(RingOptions(options_), device, transport, &registry_, &runner_, &probe_, &watchdog_),
      reservations_(
          &device_, &registry_, &residuals_, &kept_, &decoding_,
          [this](std::function<void()> work) { Enqueue(std::move(work)); },
          [this](const v1::Reserve& reserve,
                 const absl::StatusOr<std::shared_ptr<ShardOperation>>& operation,
                 int64_t workspace_bytes) { OnReserveDone(reserve, operation, workspace_bytes); },
          [this](const v1::Reserve& reserve, const absl::StatusOr<Reservations::Preparation>& made,
                 int64_t workspace_bytes) { OnPrepareOnlyDone(reserve, made, workspace_bytes); }),
      probing_("ring_probe"),
      work_("worker_control"),
      decoding_("reserve_decode") {
  budget_.SetReclaim([this](int64_t bytes) { return kept_.Evict(bytes); });
}

// Does not report membership, because the receiver may have been destroyed.
WorkerCore::~WorkerCore() {
  ending_ = true;
  LeaveRing("the worker is ending", [](bool) {});
}

void WorkerCore::OnMessage(v1::JoinResponse message) {
  switch (message.message_case()) {
    case v1::JoinResponse::kPrepare:
      last_prepare_ = message.prepare().generation();
      return Enqueue([this, prepare = message.prepare()] { OnPrepare(prepare); });
    case v1::JoinResponse::kCommit:
      return Enqueue([this, commit = message.commit()] { OnCommit(commit); });
    case v1::JoinResponse::kTeardown:
      // A Commit that is still connecting or measuring would delay the teardown.
      if (message.teardown().generation() >= last_prepare_) {
        ring_.CancelForming(message.teardown().generation());
      }
      return Enqueue([this, teardown = message.teardown()] { OnTeardown(teardown); });
    case v1::JoinResponse::kLosePeer:
      return Enqueue([this, lose = message.lose_peer()] { OnLosePeer(lose); });
    case v1::JoinResponse::kProbe:
      probing_.Start(
          [this, probe = message.probe()] {
            OnProbe(probe);
            return absl::OkStatus();
          },
          {}, HostQueue::OnFailure::kSkip);
      return;
    case v1::JoinResponse::kReserve: {
      const bool runs = message.reserve().has_inline_run();
      if (runs) ++queued_runs_;
      auto taken = std::make_shared<v1::Reserve>(std::move(*message.mutable_reserve()));
      auto work = [this, runs, reserve = std::move(taken), received = MonotonicNow()] {
        OnReserve(reserve, received);
        if (runs) --queued_runs_;
        return absl::OkStatus();
      };
      // Waking the control thread takes a considerable part of an inline run's time.
      if (runs) {
        work_.RunOrStart(std::move(work), {}, HostQueue::OnFailure::kSkip);
      } else {
        work_.Start(std::move(work), {}, HostQueue::OnFailure::kSkip);
      }
      return;
    }
    case v1::JoinResponse::kRun:
      // Runs start in the order of their messages: this one follows inline runs in the queue.
      if (queued_runs_ == 0) return StartRun(message.run());
      ++queued_runs_;
      return Enqueue([this, run = message.run()] {
        StartRun(run);
        --queued_runs_;
      });
    case v1::JoinResponse::kCancel: {
      auto operation =
          registry_.Find(message.cancel().operation_id(), message.cancel().generation());
      if (operation != nullptr) operation->operation().control().stop.store(true);
      return;
    }
    case v1::JoinResponse::kRelease:
      return Enqueue([this, release = message.release()] { OnRelease(release); });
    case v1::JoinResponse::kDropResiduals:
      return Enqueue([this, drop = message.drop_residuals()] {
        for (const std::string& id : drop.operation_ids()) residuals_.Drop(id);
      });
    case v1::JoinResponse::kKvReserve:
      return Enqueue([this, reserve = message.kv_reserve()] { kv_store_.Reserve(reserve); });
    // A ring that is forming must not delay a writer.
    case v1::JoinResponse::kKvOpen:
      return kv_store_.Open(message.kv_open());
    case v1::JoinResponse::kKvSettle:
      return kv_store_.Settle(message.kv_settle());
    case v1::JoinResponse::kKvFree:
      return Enqueue([this, free = message.kv_free()] { kv_store_.Free(free); });
    case v1::JoinResponse::kExpectRegion:
      if (options_.local_memory != nullptr) options_.local_memory->Expect(message.expect_region());
      return;
    case v1::JoinResponse::kForgetRegion:
      if (options_.local_memory != nullptr) options_.local_memory->Forget(message.forget_region());
      return;
    case v1::JoinResponse::kRegistered:
    case v1::JoinResponse::kLeave:
    case v1::JoinResponse::MESSAGE_NOT_SET:
      return;
  }
}

void WorkerCore::StartRun(const v1::Run& run) {
  RunStart start;
  if (run.has_preempt_after()) start.preempt_after = ToDuration(run.preempt_after());
  StartRun(run.operation_id(), run.generation(), start);
}

void WorkerCore::StartRun(const std::string& id, uint64_t generation, const RunStart& start) {
  auto operation = registry_.Find(id, generation);
  if (operation == nullptr) return;
  // The coordinator preempts for operations without peers only.
  if (start.preempt_after.has_value() && operation->operation().members().size() == 1) {
    return runner_.Preempt(std::move(operation), *start.preempt_after);
  }
  runner_.Announce();
  runner_.Run(std::move(operation));
}

void WorkerCore::OnDisconnected(const std::string& reason) {
  kv_store_.OnDisconnected();
  LeaveRing(reason, options_.on_membership);
  // The next coordinator knows none of the regions. Clients see their sockets close and attach
  // again.
  if (options_.local_memory != nullptr) options_.local_memory->ForgetAll();
}

void WorkerCore::LeaveRing(const std::string& reason,
                           const std::function<void(bool member)>& on_membership) {
  last_prepare_ = 0;
  ring_.CancelForming(std::numeric_limits<uint64_t>::max());
  EventRef done = work_.Start(
      [this, reason, on_membership] {
        on_membership(false);
        reservations_.ForgetAll();
        if (options_.direct_streams != nullptr) options_.direct_streams->ForgetAll();
        ring_.Forget(reason);
        kept_.Clear();
        ForgetInline();
        residuals_.Clear();
        metrics_->SetRank(std::nullopt);
        return absl::OkStatus();
      },
      {}, HostQueue::OnFailure::kSkip);
  (void)done->Wait(absl::InfiniteFuture());  // the watchdog bounds it
}

v1::Heartbeat WorkerCore::MakeHeartbeat() {
  v1::Heartbeat heartbeat;
  heartbeat.set_sequence(++heartbeat_sequence_);
  const KeptOperations::Stats kept = kept_.stats();
  // Kept memory is free to every request.
  const int64_t reserved_bytes = std::max<int64_t>(0, budget_.taken_bytes() - kept.bytes);
  heartbeat.set_reserved_bytes(reserved_bytes);
  RunningOperation running;
  if (runner_.Current(&running)) {
    heartbeat.set_operation_id(running.info.id);
    heartbeat.set_generation(running.info.generation);
    heartbeat.set_step(running.step);
    heartbeat.set_progress(running.progress);
    heartbeat.set_fraction_done(running.fraction_done);
    heartbeat.set_waits_for_peer(probe_.WaitsForPeer(device_));
  }
  if (runner_.CurrentPreempting(&running)) {
    v1::Heartbeat::Preempting* preempting = heartbeat.mutable_preempting();
    preempting->set_operation_id(running.info.id);
    preempting->set_generation(running.info.generation);
    preempting->set_step(running.step);
    preempting->set_progress(running.progress);
    preempting->set_fraction_done(running.fraction_done);
  }
  metrics_->SetReservedBytes(reserved_bytes);
  metrics_->SetKeptOperations(kept);
  if (kept.count > 0 || kept.holds > 0) Enqueue([this] { kept_.DropExpired(); });
  metrics_->SetResiduals(residuals_.count(), residuals_.bytes());
  metrics_->SetKvCaches(kv_store_.count(), kv_store_.bytes());
  metrics_->SetDeviceUsage(device_.usage());
  if (const int64_t bytes = ResidentBytes(); bytes >= 0) metrics_->SetResidentBytes(bytes);
  return heartbeat;
}

void WorkerCore::OnUploaded(const OperationInfo& info) {
  // The run follows within a round trip to the coordinator, unless other ranks' uploads take long;
  // these then announce the run again.
  runner_.Announce();
  v1::JoinRequest message;
  message.mutable_uploaded()->set_operation_id(info.id);
  message.mutable_uploaded()->set_generation(info.generation);
  send_(std::move(message));
  OnInputsComplete(info);
}

void WorkerCore::OnInputsComplete(const OperationInfo& info) {
  if (!info.run_when_uploaded.has_value()) return;
  StartRun(info.id, info.generation, *info.run_when_uploaded);
}

void WorkerCore::Enqueue(std::function<void()> work) {
  work_.Start(
      [work = std::move(work)] {
        work();
        return absl::OkStatus();
      },
      {}, HostQueue::OnFailure::kSkip);
}

void WorkerCore::OnPrepare(const v1::Prepare& prepare) {
  options_.on_membership(false);
  absl::StatusOr<std::string> blob =
      ring_.Prepare(prepare.generation(), prepare.rank(), prepare.world_size());
  if (!blob.ok()) return SendGenerationFailed(prepare.generation(), blob.status(), nullptr);
  v1::JoinRequest message;
  message.mutable_prepared()->set_generation(prepare.generation());
  message.mutable_prepared()->set_blob(*std::move(blob));
  send_(std::move(message));
}

void WorkerCore::OnCommit(const v1::Commit& commit) {
  const std::vector<int> hosts(commit.hosts().begin(), commit.hosts().end());
  if (!hosts.empty() && commit.hosts_size() != commit.blobs_size()) {
    const absl::Status status = absl::InvalidArgumentError(absl::StrCat(
        "Commit has ", commit.hosts_size(), " hosts for ", commit.blobs_size(), " ranks"));
    return SendGenerationFailed(commit.generation(), status, nullptr);
  }
  const absl::Duration limit =
      commit.has_timeout() ? ToDuration(commit.timeout()) : absl::InfiniteDuration();
  const absl::StatusOr<RingRates> rates =
      ring_.Commit(commit.generation(), {commit.blobs().begin(), commit.blobs().end()}, hosts,
                   kFormingShare * limit);
  // The commit crossed with the end of its generation.
  if (absl::IsFailedPrecondition(rates.status()) || absl::IsCancelled(rates.status())) return;
  if (!rates.ok()) return ReportUnformed(commit, rates.status());
  LogInfo(
      "ring formed",
      {{"generation", commit.generation()},
       {"rank", ring_.rank()},
       {"world_size", ring_.world_size()},
       {"next_transport", ring_.next_transport()},
       {"link_bytes_per_second", rates->link_bytes_per_second},
       {"exchange_overhead_seconds", absl::ToDoubleSeconds(rates->exchange_overhead)},
       {"host_link_bytes_per_second", rates->host_link_bytes_per_second},
       {"host_total_bytes_per_second", rates->host_total_bytes_per_second},
       {"host_exchange_overhead_seconds", absl::ToDoubleSeconds(rates->host_exchange_overhead)}});
  metrics_->SetGeneration(commit.generation());
  options_.on_membership(true);
  metrics_->SetRank(ring_.rank());
  v1::JoinRequest message;
  v1::Committed* committed = message.mutable_committed();
  committed->set_generation(commit.generation());
  committed->set_link_bytes_per_second(rates->link_bytes_per_second);
  SetDuration(rates->exchange_overhead, committed->mutable_exchange_overhead());
  committed->set_host_link_bytes_per_second(rates->host_link_bytes_per_second);
  SetDuration(rates->host_exchange_overhead, committed->mutable_host_exchange_overhead());
  committed->set_host_total_bytes_per_second(rates->host_total_bytes_per_second);
  committed->set_next_transport(ring_.next_transport());
  send_(std::move(message));
}

void WorkerCore::ReportUnformed(const v1::Commit& commit, const absl::Status& status) {
  const absl::Duration limit =
      commit.has_timeout() ? kProbeShare * ToDuration(commit.timeout()) : kLongestProbe;
  std::vector<std::string> addresses(commit.probe_addresses().begin(),
                                     commit.probe_addresses().end());
  if (ring_.rank() < static_cast<int>(addresses.size())) addresses[ring_.rank()].clear();
  // Completes even if another member's report has begun the teardown, because that member may reach
  // all others.
  const std::vector<uint32_t> unreached =
      UnreachedPeers(addresses, std::min(limit, kLongestProbe), [this] { return ending_.load(); });
  SendGenerationFailed(commit.generation(), status, nullptr, unreached);
}

void WorkerCore::OnProbe(const v1::Probe& probe) {
  const std::vector<uint32_t> unreached =
      UnreachedPeers({probe.addresses().begin(), probe.addresses().end()},
                     ToDuration(probe.timeout()), [this] { return ending_.load(); });
  if (ending_) return;
  v1::JoinRequest message;
  message.mutable_probed()->set_id(probe.id());
  message.mutable_probed()->mutable_unreached()->Assign(unreached.begin(), unreached.end());
  send_(std::move(message));
}

void WorkerCore::OnTeardown(const v1::Teardown& teardown) {
  if (teardown.generation() < ring_.generation()) return;
  options_.on_membership(false);
  reservations_.ForgetAll();
  if (options_.direct_streams != nullptr) options_.direct_streams->ForgetAll();
  ring_.TearDown(absl::StrCat("generation ", teardown.generation(), " has ended"));
  kept_.Clear();
  ForgetInline();
  metrics_->SetRank(std::nullopt);
  v1::JoinRequest message;
  message.mutable_torn_down()->set_generation(teardown.generation());
  send_(std::move(message));
}

void WorkerCore::OnLosePeer(const v1::LosePeer& lose) {
  LogWarning("ring member lost", {{"worker", options_.name},
                                  {"generation", lose.generation()},
                                  {"rank", static_cast<int64_t>(lose.rank())}});
  if (lose.rank() > static_cast<uint32_t>(std::numeric_limits<int>::max())) return;
  ring_.LosePeer(lose.generation(), static_cast<int>(lose.rank()));
}

void WorkerCore::OnReserve(std::shared_ptr<v1::Reserve> reserve, absl::Time received) {
  if (!ring_.formed() || reserve->generation() != ring_.generation()) return;
  received_ = received;
  reservations_.Reserve(std::move(reserve),
                        {ring_.rank(), ring_.world_size(), ring_.key_arrival(), ring_.hosts()});
}

void WorkerCore::OnReserveDone(const v1::Reserve& reserve,
                               const absl::StatusOr<std::shared_ptr<ShardOperation>>& operation,
                               int64_t workspace_bytes) {
  if (operation.ok() && !reserve.token().empty()) ExpectStreams(reserve, *operation);
  v1::JoinRequest message;
  v1::Reserved* reserved = message.mutable_reserved();
  *reserved = AnswerTo(reserve, operation.status(), workspace_bytes);
  if (operation.ok()) {
    reserved->set_bytes((*operation)->reserved_bytes());
    reserved->set_slowdown(SlowdownOf((*operation)->operation(), options_.kernel_rates));
    if (reserve.retain()) reserved->set_residual_bytes(ResidualBytes((*operation)->operation()));
  }
  if (operation.ok() && reserve.has_inline_run()) {
    if (reserve.places().empty()) return RunInline(reserve, *operation, std::move(*reserved));
    if (RunInlineInMemory(reserve, *operation, *reserved)) return;
  }
  send_(std::move(message));
  // A shard without rows has no inputs to wait for.
  if (operation.ok() && (*operation)->TakeUploadedNotice()) OnUploaded((*operation)->info());
  if (operation.ok() && !reserve.places().empty()) BeginCopies(reserve, *operation);
}

v1::Reserved WorkerCore::AnswerTo(const v1::Reserve& reserve, const absl::Status& status,
                                  int64_t workspace_bytes) const {
  v1::Reserved reserved;
  reserved.set_operation_id(reserve.operation_id());
  reserved.set_generation(reserve.generation());
  reserved.set_ok(status.ok());
  reserved.set_workspace_bytes(workspace_bytes);
  reserved.set_residual_missing(absl::IsNotFound(status));
  reserved.set_malformed(absl::IsInvalidArgument(status));
  reserved.set_not_kept(absl::IsFailedPrecondition(status));
  if (status.ok()) return reserved;
  reserved.set_reason(std::string(status.message()));
  LogWarning("shard refused", {{"worker", options_.name},
                               {"request_id", reserve.request_id()},
                               {"traceparent", reserve.traceparent()},
                               {"operation_id", reserve.operation_id()},
                               {"generation", reserve.generation()},
                               {"reason", reserved.reason()}});
  return reserved;
}

void WorkerCore::OnPrepareOnlyDone(const v1::Reserve& reserve,
                                   const absl::StatusOr<Reservations::Preparation>& made,
                                   int64_t workspace_bytes) {
  v1::JoinRequest message;
  v1::Reserved* reserved = message.mutable_reserved();
  *reserved = AnswerTo(reserve, made.status(), workspace_bytes);
  if (made.ok()) {
    reserved->set_bytes(static_cast<uint64_t>(made->bytes));
    reserved->set_found(made->found);
    metrics_->CountPreparation(made->found);
  }
  send_(std::move(message));
}

void WorkerCore::BeginCopies(const v1::Reserve& reserve,
                             const std::shared_ptr<ShardOperation>& operation) {
  if (options_.local_memory != nullptr) {
    return options_.local_memory->Begin(operation, reserve);
  }
  SendTransferFailed(reserve, "this worker does not accept host memory (--local_memory)");
}

void WorkerCore::ExpectStreams(const v1::Reserve& reserve,
                               const std::shared_ptr<ShardOperation>& operation) {
  if (options_.direct_streams != nullptr) {
    return options_.direct_streams->Begin(operation, reserve);
  }
  SendTransferFailed(reserve,
                     "this worker accepts no direct streams; start it with --client_data_listen");
}

void WorkerCore::SendTransferFailed(const v1::Reserve& reserve, const std::string& why) {
  v1::JoinRequest message;
  v1::TransferProgress* progress = message.mutable_transfer_progress();
  progress->set_operation_id(reserve.operation_id());
  progress->set_generation(reserve.generation());
  progress->set_failure(why);
  send_(std::move(message));
}

// Keeps residuals only of operations reserved with `retain`; the coordinator requests no others.
void WorkerCore::OnRelease(const v1::Release& release) {
  if (release.keep_residual()) {
    const auto operation = registry_.Find(release.operation_id(), release.generation());
    std::shared_ptr<const Residual> residual =
        operation == nullptr ? nullptr : operation->TakeResidual();
    if (residual != nullptr) residuals_.Put(release.operation_id(), std::move(residual));
  }
  if (options_.direct_streams != nullptr) {
    options_.direct_streams->Forget(release.operation_id(), release.generation());
  }
  reservations_.Release(release.operation_id(), release.generation());
}

void WorkerCore::OnReleased(const OperationInfo& info) {
  v1::JoinRequest message;
  {
    absl::MutexLock lock(&inline_mutex_);
    const auto answer = inline_answers_.find(info.id);
    if (answer != inline_answers_.end()) {
      message = std::move(answer->second);
      inline_answers_.erase(answer);
    }
  }
  if (message.message_case() != v1::JoinRequest::MESSAGE_NOT_SET) return send_(std::move(message));
  message.mutable_released()->set_operation_id(info.id);
  message.mutable_released()->set_generation(info.generation);
  send_(std::move(message));
}

void WorkerCore::OnRunDone(ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
                           const RunningOperation& last) {
  const OperationInfo& info = operation.info();
  LogRun(operation, result);
  if (!result.ok()) metrics_->CountFailedRun(result.status().code());
  if (absl::IsUnavailable(result.status())) {
    return SendGenerationFailed(info.generation, result.status(), &last);
  }
  v1::JoinRequest message;
  v1::Finished* finished = message.mutable_finished();
  finished->set_operation_id(info.id);
  finished->set_generation(info.generation);
  finished->set_ok(result.ok());
  finished->set_cancelled(absl::IsCancelled(result.status()));
  if (result.ok()) {
    metrics_->CountRun(operation.operation(), *result, operation.upload_copies().total);
    *finished->mutable_report() = MakeRankReport(operation, *result, options_.name);
  } else {
    finished->set_reason(std::string(result.status().message()));
  }
  if (const std::optional<InlineOperation> run = FindInline(info.id)) {
    return AnswerRun(operation, *run, std::move(message));
  }
  send_(std::move(message));
}

void WorkerCore::LogRun(const ShardOperation& operation,
                        const absl::StatusOr<ExecutionReport>& result) const {
  const OperationInfo& info = operation.info();
  const ExecutionReport report = result.ok() ? *result : ExecutionReport();
  Log(result.ok() || absl::IsCancelled(result.status()) ? LogLevel::kInfo : LogLevel::kWarning,
      "run ended",
      {{"worker", options_.name},
       {"request_id", info.request_id},
       {"traceparent", info.traceparent},
       {"operation_id", info.id},
       {"generation", info.generation},
       {"code", absl::StatusCodeToString(result.status().code())},
       {"error", std::string(result.status().message())},
       {"compute_seconds", absl::ToDoubleSeconds(report.compute_time)},
       {"ring_wait_seconds", absl::ToDoubleSeconds(report.ring_wait_time)}});
}

void WorkerCore::SendGenerationFailed(uint64_t generation, const absl::Status& status,
                                      const RunningOperation* last,
                                      const std::vector<uint32_t>& unreached) {
  // A failed run has its own log line.
  if (last == nullptr) {
    LogWarning("the ring cannot form", {{"worker", options_.name},
                                        {"generation", generation},
                                        {"reason", std::string(status.message())},
                                        {"unreached_ranks", absl::StrJoin(unreached, ",")}});
  }
  v1::JoinRequest message;
  v1::GenerationFailed* failed = message.mutable_generation_failed();
  failed->mutable_unreached()->Assign(unreached.begin(), unreached.end());
  failed->set_generation(generation);
  failed->set_reason(std::string(status.message()));
  if (last != nullptr) {
    failed->set_operation_id(last->info.id);
    failed->set_step(last->step);
    failed->set_progress(last->progress);
  }
  send_(std::move(message));
}

}  // namespace ringattn::worker
