#include "server/edge/server.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include <grpcpp/resource_quota.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/base/version.h"
#include "common/observability/log.h"
#include "common/process/descriptors.h"
#include "common/process/listener_probe.h"
#include "common/security/security_metrics.h"
#include "common/wire/grpc_1_51/resting_threads.h"
#include "server/core/loss/losses.h"
#include "server/edge/status/live_page.h"
#include "server/identity/gate.h"

namespace ringattn::server {
namespace {

// Returns the ranks of each host, as "node-a: 0 1; node-b: 2 3".
std::string HostsText(const v1::Topology& topology) {
  std::string text;
  std::string last;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    const std::string& host = worker.location().host();
    if (text.empty() || host != last) {
      absl::StrAppend(&text, text.empty() ? "" : "; ", host.empty() ? "unknown" : host, ":");
    }
    absl::StrAppend(&text, " ", worker.rank());
    last = host;
  }
  return text;
}

constexpr char kAttentionService[] = "ringattn.v1.AttentionService";
constexpr char kKvCacheService[] = "ringattn.v1.KvCacheService";

// 64 workers, each of which may replace a connection that is still open, and operators.
constexpr int64_t kMaxControlConnections = 256;
constexpr int64_t kShardConnections = 64 * 4;  // of ShardChannels, to max_world_size workers
// The metrics port, logs and gRPC itself.
constexpr int64_t kOtherDescriptors = 64;
constexpr int64_t kMostConnections = 10'000;
// Time for statuses to be sent before a client that does not read is cut off.
constexpr absl::Duration kLastWords = absl::Milliseconds(500);

Failure CutOffByShutdown(absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kUnavailable;
  failure.message = "the server is shutting down and the request did not end in time";
  failure.reason = "SHUTTING_DOWN";
  failure.retry_after = retry_after;
  return failure;
}

}  // namespace

int64_t DefaultMaxConnections(int64_t descriptors) {
  const int64_t others = kMaxControlConnections + kShardConnections + kOtherDescriptors;
  return std::clamp(std::max(descriptors - others, descriptors / 2), int64_t{1}, kMostConnections);
}

Server::Server(ServerOptions options, std::unique_ptr<ClientDirectory> directory)
    : options_(std::move(options)),
      server_metrics_(&metrics_, options_.core.limits),
      directory_(std::move(directory)),
      callers_(directory_.get(), options_.core.limits, &metrics_),
      core_(options_.core, this),
      registry_(options_.core.limits),
      writer_groups_(options_.core.limits),
      residual_holds_(options_.core.limits, "HoldResiduals"),
      kv_holds_(options_.core.limits, "HoldCaches"),
      kv_relays_(options_.core.limits),
      calls_streams_(options_.core.limits),
      channels_(options_.core.limits, options_.cluster_security),
      board_(options_.topology),
      request_context_{.limits = options_.core.limits,
                       .secret = options_.secret,
                       .retry_after = options_.core.retry_after,
                       .core = &core_,
                       .registry = &registry_,
                       .writers = &writer_groups_,
                       .channels = &channels_,
                       .metrics = &server_metrics_,
                       .callers = &callers_,
                       .holds = &residual_holds_,
                       .calls_streams = &calls_streams_},
      kv_context_{.limits = options_.core.limits,
                  .secret = options_.secret,
                  .retry_after = options_.core.retry_after,
                  .core = &core_,
                  .callers = &callers_,
                  .channels = &channels_,
                  .metrics = &server_metrics_,
                  .holds = &kv_holds_,
                  .relays = &kv_relays_},
      attention_service_(&request_context_),
      cluster_service_(kVersion, options_.core.limits, options_.core.retry_after, &core_, &board_,
                       &callers_),
      local_memory_service_(options_.core.limits, options_.core.retry_after, &core_, &callers_),
      kv_cache_service_(&kv_context_),
      join_service_(&core_, options_.secret),
      admin_service_(&core_, options_.secret) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  std::unique_ptr<ClientDirectory> directory;
  if (!options.clients_file.empty()) {
    auto opened = ClientDirectory::Open(options.clients_file);
    if (!opened.ok()) return opened.status();
    directory = *std::move(opened);
  }
  std::unique_ptr<Server> server(new Server(std::move(options), std::move(directory)));
  if (absl::Status status = server->Listen(); !status.ok()) return status;
  return server;
}

absl::Status Server::Listen() {
  if (!options_.health_listen.empty()) {
    auto health = wire::HealthListener::Start(options_.health_listen);
    if (!health.ok()) return health.status();
    health_ = *std::move(health);
    addresses_.health = health_->address();
  }
  ExportTls(&metrics_, "clients", options_.client_security);
  ExportTls(&metrics_, "cluster", options_.cluster_security);
  if (!options_.audit_log.empty()) {
    auto audit = AuditLog::Open(options_.audit_log, &metrics_);
    if (!audit.ok()) return audit.status();
    audit_ = *std::move(audit);
    request_context_.audit = audit_.get();
    kv_context_.audit = audit_.get();
  }
  DescribeProcess(metrics_, kVersion);
  grpc::ResourceQuota quota("ringattn");
  quota.Resize(options_.max_transport_bytes);
  quota.SetMaxThreads(options_.max_reflection_threads);
  const int64_t max_connections = options_.max_connections > 0
                                      ? options_.max_connections
                                      : DefaultMaxConnections(DescriptorLimit());

  if (!options_.metrics_listen.empty()) {
    absl::StatusOr<std::string> metrics =
        metrics_.Serve(options_.metrics_listen,
                       LivePage({kVersion, MonotonicNow(), options_.core.limits}, &status_board_));
    if (!metrics.ok()) return metrics.status();
    addresses_.metrics = *std::move(metrics);
  }
  auto control = Endpoint::Start({.name = "control",
                                  .listen = options_.control_listen,
                                  .security = options_.cluster_security,
                                  .max_connections = kMaxControlConnections,
                                  .max_message_bytes = options_.core.limits.max_message_bytes,
                                  .min_ping_interval = options_.min_ping_interval},
                                 quota, {&join_service_, &admin_service_});
  if (!control.ok()) return control.status();
  control_ = *std::move(control);
  addresses_.control = control_->address();
  auto endpoint = Endpoint::Start(
      {.name = "public",
       .listen = options_.listen,
       .security = options_.client_security,
       .gate = MakeGate(),
       .max_connections = max_connections,
       .max_message_bytes = options_.core.limits.max_refused_message_bytes,
       .min_ping_interval = options_.min_ping_interval},
      quota, {&attention_service_, &cluster_service_, &local_memory_service_, &kv_cache_service_});
  if (!endpoint.ok()) return endpoint.status();
  public_ = *std::move(endpoint);
  addresses_.listen = public_->address();
  SetServing(false);
  SetAlive(true);
  WatchOver();
  core_.Start();
  return absl::OkStatus();
}

std::shared_ptr<grpc::AuthMetadataProcessor> Server::MakeGate() {
  if (directory_ == nullptr) return nullptr;
  return std::make_shared<Gate>(directory_.get(),
                                [this](const Failure& failure) { callers_.Refused(failure, ""); });
}

void Server::WatchOver() {
  housekeeping_.emplace(HousekeepingOptions{}, &metrics_,
                        wire::ListenerMetrics::Listeners{{"public", &public_->listener()},
                                                         {"control", &control_->listener()}});
  const ListenerProtocol speech =
      options_.client_security.is_plain() ? ListenerProtocol::kPlainText : ListenerProtocol::kTls;
  liveness_.emplace(
      options_.liveness,
      Liveness::Handlers{
          .probe = [address = addresses_.listen, speech](
                       absl::Duration timeout) { return ProbeListener(address, timeout, speech); },
          .on_change =
              [this](const absl::Status& why) {
                SetAlive(why.ok());
                if (why.ok()) return LogInfo("the public port answers again");
                LogError("the public port does not answer", {{"why", why.ToString()}});
              },
          .on_dead =
              [this](const absl::Status& why) {
                LogError("the public port does not recover", {{"why", why.ToString()}});
                options_.on_dead();
              }});
}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

bool Server::Shutdown(absl::Duration timeout) {
  if (std::exchange(is_shut_down_, true)) return true;
  bool drained = true;
  if (public_ != nullptr) {
    SetServing(false);
    if (timeout > absl::ZeroDuration()) drained = admin_service_.DrainAndWait(timeout);
    if (!drained) CutOff();
    writer_groups_.FailWaiting(CutOffByShutdown(options_.core.retry_after));
    liveness_.reset();
    board_.Close();
    residual_holds_.Close();
    kv_holds_.Close();
    calls_streams_.Close();
    kv_relays_.Close(CutOffByShutdown(options_.core.retry_after));
    admin_service_.Close();
    public_->Shutdown(absl::Now() +
                      (timeout > absl::ZeroDuration() ? kLastWords : absl::ZeroDuration()));
  }
  if (control_ != nullptr) {
    // The workers' streams end because this process ends, so no worker is lost.
    is_ending_.store(true);
    join_service_.Close();
    control_->Shutdown(absl::Now() +
                       (timeout > absl::ZeroDuration() ? kLastWords : absl::ZeroDuration()));
  }
  core_.Stop();
  metrics_.StopServing();
  housekeeping_.reset();
  return drained;
}

void Server::CutOff() {
  const Failure failure = CutOffByShutdown(options_.core.retry_after);
  // Requests end on the core's thread; the event itself changes nothing.
  core_.Post(DrainRequested{}, [streams = registry_.All(), failure] {
    for (const std::shared_ptr<RequestCall>& stream : streams) stream->Fail(failure);
  });
}

void Server::SetServing(bool serving) {
  public_->SetServing("", serving);
  public_->SetServing(kAttentionService, serving);
  public_->SetServing(kKvCacheService, serving);
  public_->SetServing(wire::kReadinessName, serving);
  if (health_ == nullptr) return;
  health_->SetServing("", serving);
  health_->SetServing(wire::kReadinessName, serving);
}

void Server::SetAlive(bool alive) {
  public_->SetServing(wire::kLivenessName, alive);
  if (health_ != nullptr) health_->SetServing(wire::kLivenessName, alive);
}

template <typename Work>
void Server::Answer(std::shared_ptr<RequestCall> call, Work work) {
  if (call == nullptr) return;
  if (call != inline_call_) return work(*call);
  core_.AfterEvents([call = std::move(call), work = std::move(work)]() mutable { work(*call); });
}

void Server::CarryOut(Action action, const Coordinator& core) {
  struct Visitor {
    Server* server;
    const Coordinator& core;

    std::shared_ptr<RequestCall> Find(StreamId stream) { return server->registry_.Find(stream); }
    void operator()(SendToWorker& a) {
      server->join_service_.Send(a.connection, std::move(a.message));
    }
    void operator()(const DropWorker& a) { server->join_service_.Drop(a.connection, a.reason); }
    void operator()(AcceptRequest& a) {
      std::shared_ptr<RequestCall> call = Find(a.stream);
      if (a.is_inline) server->inline_call_ = call;
      server->Answer(std::move(call),
                     [a = std::move(a)](RequestCall& answered) { answered.Accept(a); });
    }
    void operator()(BeginDownload& a) {
      std::shared_ptr<RequestCall> call = Find(a.stream);
      server->Answer(std::move(call), [a = std::move(a)](RequestCall& answered) mutable {
        answered.Download(std::move(a));
      });
    }
    void operator()(const TransferAdvanced& a) {
      if (auto stream = Find(a.stream)) stream->Advance(a);
    }
    void operator()(const AttachCompleted& a) { server->local_memory_service_.Complete(a); }
    void operator()(const KvCacheAnswered& a) { server->kv_cache_service_.Answer(a); }
    void operator()(const KvWriterAnswered& a) { server->kv_cache_service_.Answer(a); }
    void operator()(const KvWriterEnded& a) { server->kv_relays_.End(a.id, a.epoch, a.failure); }
    void operator()(FinishRequest& a) {
      const std::shared_ptr<RequestCall> call = Find(a.stream);
      server->Answer(call, [a = std::move(a)](RequestCall& answered) { answered.Succeed(a); });
      if (call == server->inline_call_) server->inline_call_.reset();
    }
    void operator()(const FailRequest& a) {
      const std::shared_ptr<RequestCall> call = Find(a.stream);
      if (call == nullptr) return;
      if (call == server->inline_call_) server->inline_call_.reset();
      call->Fail(a.failure);
    }
    void operator()(const StateChanged&) {}  // the core is queried instead
    void operator()(const PlanThis&) {}      // handled by CoreLoop
    void operator()(const CancelPlan&) {}    // handled by CoreLoop
    void operator()(const TopologyChanged& a) {
      // Reserved memory changes twice per request. OnTick publishes it.
      server->memory_changed_ = a.only_memory;
      if (a.only_memory) return;
      v1::Topology topology = core.topology();
      OnMembers(topology);
      server->board_.Publish(std::move(topology), /*only_memory=*/false);
    }
    void OnMembers(const v1::Topology& topology) {
      std::set<std::string> addresses;
      for (const v1::WorkerInfo& worker : topology.workers()) {
        addresses.insert(worker.data_address());
      }
      server->channels_.Keep(addresses);
      server->server_metrics_.SetTopology(topology);
      LogInfo("topology changed", {{"state", v1::RingState_Name(topology.state())},
                                   {"generation", topology.generation()},
                                   {"workers", topology.workers_size()},
                                   {"hosts", HostsText(topology)}});
    }
    void operator()(const LostWorker& a) {
      if (server->is_ending_.load()) return;
      server->server_metrics_.WorkerLost(a);
    }
    void operator()(const LossEvent& a) {
      if (server->is_ending_.load()) return;
      const LostWorker& first = a.workers.front();
      if (a.host.empty()) {
        LogWarning("worker lost", {{"worker", first.worker},
                                   {"device", first.device},
                                   {"rank", first.rank.value_or(-1)},
                                   {"generation", first.generation},
                                   {"reason", LossReasonName(first.reason)},
                                   {"detail", first.detail},
                                   {"ended_requests", first.ended_requests}});
        return;
      }
      std::vector<std::string> workers;
      int64_t ended_requests = 0;
      for (const LostWorker& loss : a.workers) {
        workers.push_back(loss.worker);
        ended_requests += loss.ended_requests;
      }
      LogWarning("host lost", {{"host", a.host},
                               {"workers", absl::StrJoin(workers, " ")},
                               {"generation", first.generation},
                               {"reason", LossReasonName(first.reason)},
                               {"detail", first.detail},
                               {"ended_requests", ended_requests}});
    }
    void operator()(const LossOutlived& a) {
      if (server->is_ending_.load()) return;
      LogInfo("requests outlived a loss", {{"generation", a.generation},
                                           {"completed_requests", a.completed},
                                           {"ended_requests", a.ended},
                                           {"seconds", absl::ToDoubleSeconds(a.duration)}});
    }
    void operator()(const ReachChanged& a) {
      if (server->is_ending_.load()) return;
      if (a.reached) {
        LogInfo("hosts reach each other again", {{"host", a.a}, {"other_host", a.b}});
      } else {
        LogWarning("hosts parted", {{"host", a.a}, {"other_host", a.b}, {"detail", a.detail}});
      }
    }
    void operator()(const ServingChanged& a) { server->SetServing(a.serving); }
    void operator()(const DrainCompleted&) { server->admin_service_.OnDrained(); }
    void operator()(const RingReformed& a) { server->admin_service_.OnReformed(a); }
  };
  std::visit(Visitor{this, core}, action);
}

ServerStatus Server::MakeStatus(const Coordinator& core) const {
  ServerStatus status;
  status.core = core.Snapshot(status_board_.options().max_requests);
  for (const RequestSnapshot& request : status.core.requests) {
    const std::shared_ptr<RequestCall> call = registry_.Find(request.stream);
    status.transfers.push_back(call == nullptr ? TransferTotals() : call->Totals());
  }
  return status;
}

void Server::OnTick(absl::Time now, const Coordinator& core) {
  const CoordinatorStats stats = core.stats();
  server_metrics_.SetStats(stats);
  if (std::exchange(memory_changed_, false)) {
    board_.Publish(core.topology(), /*only_memory=*/true);
  }
  server_metrics_.SetPlanning(core_.planning_stats());
  server_metrics_.SetResidualHolds(residual_holds_.streams());
  server_metrics_.SetKvStreams(kv_holds_.streams(), kv_relays_.streams());
  server_metrics_.SetCallsStreams(calls_streams_.streams());
  server_metrics_.SetRestingThreads(wire::RestingThreads::resting());
  housekeeping_->SetBusy(stats.queued_requests + stats.active_requests > 0);
  if (status_board_.PublishIsDue(now)) status_board_.Publish(MakeStatus(core), now);
  for (const std::shared_ptr<RequestCall>& call : registry_.All()) call->OnTick(now, core);
  writer_groups_.OnTick(now);
  server_metrics_.SetWaitingWriters(writer_groups_.waiting());
  const auto has_residual = [&core](const std::string& handle, const std::string& principal) {
    return !core.FindResidual(handle, principal, "").failure.has_value();
  };
  for (Renewal& held : residual_holds_.Due(now, has_residual)) {
    core_.Post(ResidualsRenewed{std::move(held.ids), std::move(held.principal), held.ttl});
  }
  const auto has_cache = [&core](const std::string& id, const std::string& principal) {
    const KvCacheView view = core.FindKvCache(id, principal);
    return !view.failure.has_value() && !view.ended.has_value();
  };
  for (Renewal& held : kv_holds_.Due(now, has_cache)) {
    core_.Post(KvCachesRenewed{std::move(held.ids), std::move(held.principal), held.ttl});
  }
  kv_relays_.OnTick(now);
}

}  // namespace ringattn::server
