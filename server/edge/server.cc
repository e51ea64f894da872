#include "server/edge/server.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include <grpcpp/resource_quota.h>

#include "absl/time/clock.h"
#include "common/base/version.h"
#include "common/observability/log.h"
#include "common/process/descriptors.h"
#include "common/process/listener_probe.h"
#include "server/core/losses.h"
#include "server/edge/live_page.h"

namespace ringattn::server {
namespace {

constexpr char kAttentionService[] = "ringattn.v1.AttentionService";

// 64 workers, each of which may be about to replace a connection that is not yet given up,
// and operators.
constexpr int64_t kMaxControlConnections = 256;
constexpr int64_t kShardConnections = 64 * 4;  // of ShardChannels, to max_world_size workers
// The metrics port's, logs, gRPC's own.
constexpr int64_t kOtherDescriptors = 64;
constexpr int64_t kMostConnections = 10'000;
// For statuses to leave; a client that does not take its own is cut off.
constexpr absl::Duration kLastWords = absl::Milliseconds(500);

Failure CutOffByShutdown(absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kUnavailable;
  failure.message = "the server shuts down and the request did not end in time";
  failure.reason = "SHUTTING_DOWN";
  failure.retry_after = retry_after;
  return failure;
}

}  // namespace

int64_t DefaultMaxConnections(int64_t descriptors) {
  const int64_t others = kMaxControlConnections + kShardConnections + kOtherDescriptors;
  return std::clamp(std::max(descriptors - others, descriptors / 2), int64_t{1}, kMostConnections);
}

Server::Server(ServerOptions options)
    : options_(std::move(options)),
      server_metrics_(&metrics_, options_.core.limits),
      core_(options_.core, this),
      registry_(options_.core.limits),
      channels_(options_.core.limits, options_.cluster_security),
      board_(options_.topology),
      request_context_{options_.core.limits, options_.secret, options_.core.retry_after, &core_,
                       &registry_,           &channels_,      &server_metrics_},
      attention_service_(&request_context_),
      cluster_service_(kVersion, options_.core.limits, options_.core.retry_after, &core_, &board_),
      join_service_(&core_, options_.secret),
      admin_service_(&core_, options_.secret) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  std::unique_ptr<Server> server(new Server(std::move(options)));
  if (absl::Status status = server->Listen(); !status.ok()) return status;
  return server;
}

absl::Status Server::Listen() {
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
                       LivePage({kVersion, absl::Now(), options_.core.limits}, &status_board_));
    if (!metrics.ok()) return metrics.status();
    addresses_.metrics = *std::move(metrics);
  }
  auto control = Endpoint::Start({.name = "control",
                                  .listen = options_.control_listen,
                                  .max_connections = kMaxControlConnections,
                                  .max_message_bytes = options_.core.limits.max_message_bytes,
                                  .min_ping_interval = options_.min_ping_interval},
                                 quota, {&join_service_, &admin_service_});
  if (!control.ok()) return control.status();
  control_ = *std::move(control);
  addresses_.control = control_->address();
  auto endpoint =
      Endpoint::Start({.name = "public",
                       .listen = options_.listen,
                       .max_connections = max_connections,
                       .max_message_bytes = options_.core.limits.max_refused_message_bytes,
                       .min_ping_interval = options_.min_ping_interval},
                      quota, {&attention_service_, &cluster_service_});
  if (!endpoint.ok()) return endpoint.status();
  public_ = *std::move(endpoint);
  addresses_.listen = public_->address();
  SetServing(false);
  public_->SetServing(kLivenessName, true);
  WatchOver();
  core_.Start();
  return absl::OkStatus();
}

void Server::WatchOver() {
  housekeeping_.emplace(HousekeepingOptions{}, &metrics_,
                        Housekeeping::Listeners{{"public", &public_->listener()},
                                                {"control", &control_->listener()}});
  liveness_.emplace(
      options_.liveness,
      Liveness::Handlers{
          .probe = [address = addresses_.listen](
                       absl::Duration timeout) { return ProbeListener(address, timeout); },
          .on_change =
              [this](const absl::Status& why) {
                public_->SetServing(kLivenessName, why.ok());
                if (why.ok()) return LogInfo("the public port answers again");
                LogError("the public port does not answer", {{"why", why.ToString()}});
              },
          .on_dead =
              [this](const absl::Status& why) {
                LogError("the public port stays dead", {{"why", why.ToString()}});
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
    liveness_.reset();
    board_.Close();
    admin_service_.Close();
    public_->Shutdown(absl::Now() +
                      (timeout > absl::ZeroDuration() ? kLastWords : absl::ZeroDuration()));
  }
  if (control_ != nullptr) control_->Shutdown(absl::Now());
  core_.Stop();
  metrics_.StopServing();
  housekeeping_.reset();
  return drained;
}

void Server::CutOff() {
  const Failure failure = CutOffByShutdown(options_.core.retry_after);
  // On the core's thread, as all that ends a request. The event itself is no news.
  core_.Post(DrainRequested{}, [streams = registry_.All(), failure] {
    for (const std::shared_ptr<RequestCall>& stream : streams) stream->Fail(failure);
  });
}

void Server::SetServing(bool serving) {
  public_->SetServing("", serving);
  public_->SetServing(kAttentionService, serving);
}

void Server::CarryOut(const Action& action, const Coordinator& core) {
  struct Visitor {
    Server* server;
    const Coordinator& core;

    std::shared_ptr<RequestCall> Find(StreamId stream) { return server->registry_.Find(stream); }
    void operator()(const SendToWorker& a) { server->join_service_.Send(a.connection, a.message); }
    void operator()(const DropWorker& a) { server->join_service_.Drop(a.connection, a.reason); }
    void operator()(const AcceptRequest& a) {
      if (auto stream = Find(a.stream)) stream->Accept(a);
    }
    void operator()(const BeginDownload& a) {
      if (auto stream = Find(a.stream)) stream->Download(a);
    }
    void operator()(const FinishRequest& a) {
      if (auto stream = Find(a.stream)) stream->Succeed(a);
    }
    void operator()(const FailRequest& a) {
      if (auto stream = Find(a.stream)) stream->Fail(a.failure);
    }
    void operator()(const StateChanged&) {}  // whoever wants to know asks the core
    void operator()(const PlanThis&) {}      // seen to by CoreLoop
    void operator()(const CancelPlan&) {}    // likewise
    void operator()(const TopologyChanged& a) {
      v1::Topology topology = core.topology();
      if (!a.only_memory) OnMembers(topology);
      server->board_.Publish(std::move(topology), a.only_memory);
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
                                   {"workers", topology.workers_size()}});
    }
    void operator()(const LostWorker& a) {
      server->server_metrics_.WorkerLost(a);
      LogWarning("worker lost", {{"worker", a.worker},
                                 {"device", a.device},
                                 {"rank", a.rank.value_or(-1)},
                                 {"generation", a.generation},
                                 {"reason", LossReasonName(a.reason)},
                                 {"words", a.words},
                                 {"ended_requests", a.ended_requests}});
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
  housekeeping_->SetBusy(stats.queued_requests + stats.active_requests > 0);
  if (status_board_.Wants(now)) status_board_.Publish(MakeStatus(core), now);
  for (const std::shared_ptr<RequestCall>& call : registry_.All()) call->OnTick(now, core);
}

}  // namespace ringattn::server
