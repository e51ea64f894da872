#include "server/edge/server.h"

#include <google/protobuf/stubs/logging.h>

#include <set>
#include <utility>
#include <variant>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/version.h"
#include "common/observability/log.h"
#include "common/wire/transport.h"

namespace ringattn::server {
namespace {

constexpr char kAttentionService[] = "ringattn.v1.AttentionService";

// More than the registry admits in all, so that its answer, which has a code and a
// reason, comes before HTTP/2's silent queueing.
constexpr int kMaxStreamsPerConnection = 4096;

// Registers what every gRPC server of this process gets from here on.
void InitPlugins() {
  static const bool once = [] {
    // What it would say about malformed messages, the client is told.
    google::protobuf::SetLogHandler(nullptr);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)once;
}

void Configure(const grpc::ResourceQuota& quota, int64_t max_message_bytes,
               grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  builder->SetMaxSendMessageSize(-1);
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  wire::SetTransport(builder);
  // Clients may hold a connection without a call.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // For reflection, the one service here with blocking calls.
  builder->SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
}

std::string BoundAddress(const std::string& listen, int port) {
  return absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
}

absl::Status CannotListen(const char* what, const std::string& address) {
  return absl::UnavailableError(absl::StrCat(what, ": cannot listen on ", address));
}

}  // namespace

Server::Server(ServerOptions options)
    : options_(std::move(options)),
      server_metrics_(&metrics_),
      core_(options_.core, this),
      registry_(options_.core.limits),
      channels_(options_.core.limits),
      request_context_{options_.core.limits, options_.secret, options_.core.retry_after, &core_,
                       &registry_,           &channels_,      &server_metrics_},
      attention_service_(&request_context_),
      cluster_service_(kVersion, options_.core.limits, &core_, &board_),
      join_service_(&core_, options_.secret),
      admin_service_(&core_, options_.secret) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  std::unique_ptr<Server> server(new Server(std::move(options)));
  if (absl::Status status = server->Listen(); !status.ok()) return status;
  return server;
}

absl::Status Server::Listen() {
  InitPlugins();
  grpc::ResourceQuota quota("ringattn");
  quota.Resize(options_.max_transport_bytes);
  const int64_t max_message_bytes = options_.core.limits.max_message_bytes;

  if (!options_.metrics_listen.empty()) {
    absl::StatusOr<std::string> metrics = metrics_.Serve(options_.metrics_listen);
    if (!metrics.ok()) return metrics.status();
    addresses_.metrics = *std::move(metrics);
  }

  int control_port = 0;
  grpc::ServerBuilder control;
  Configure(quota, max_message_bytes, &control);
  control.AddListeningPort(options_.control_listen, grpc::InsecureServerCredentials(),
                           &control_port);
  control.RegisterService(&join_service_);
  control.RegisterService(&admin_service_);
  control_server_ = control.BuildAndStart();
  if (control_server_ == nullptr || control_port == 0) {
    return CannotListen("control", options_.control_listen);
  }
  addresses_.control = BoundAddress(options_.control_listen, control_port);

  int public_port = 0;
  grpc::ServerBuilder builder;
  Configure(quota, options_.core.limits.max_refused_message_bytes, &builder);
  builder.AddListeningPort(options_.listen, grpc::InsecureServerCredentials(), &public_port);
  builder.RegisterService(&attention_service_);
  builder.RegisterService(&cluster_service_);
  public_server_ = builder.BuildAndStart();
  if (public_server_ == nullptr || public_port == 0) {
    return CannotListen("public", options_.listen);
  }
  addresses_.listen = BoundAddress(options_.listen, public_port);
  SetServing(false);
  core_.Start();
  return absl::OkStatus();
}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

bool Server::Shutdown(absl::Duration timeout) {
  if (std::exchange(is_shut_down_, true)) return true;
  bool drained = true;
  if (public_server_ != nullptr) {
    SetServing(false);
    if (timeout > absl::ZeroDuration()) drained = admin_service_.DrainAndWait(timeout);
    board_.Close();
    admin_service_.Close();
    // The last answers get a moment to leave; what still runs is cancelled.
    const auto now = std::chrono::system_clock::now();
    public_server_->Shutdown(now + std::chrono::milliseconds(drained ? 500 : 0));
  }
  if (control_server_ != nullptr) control_server_->Shutdown(std::chrono::system_clock::now());
  core_.Stop();
  return drained;
}

void Server::SetServing(bool serving) {
  auto* health = public_server_->GetHealthCheckService();
  health->SetServingStatus("", serving);
  health->SetServingStatus(kAttentionService, serving);
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
    void operator()(const TopologyChanged& a) {
      v1::Topology topology = core.topology();
      if (!a.only_memory) OnMembers(topology);
      server->board_.Publish(std::move(topology));
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
    void operator()(const ServingChanged& a) { server->SetServing(a.serving); }
    void operator()(const DrainCompleted&) { server->admin_service_.OnDrained(); }
    void operator()(const RingReformed& a) { server->admin_service_.OnReformed(a); }
  };
  std::visit(Visitor{this, core}, action);
}

void Server::OnTick(absl::Time now, const Coordinator& core) {
  server_metrics_.SetStats(core.stats());
  for (const std::shared_ptr<RequestCall>& call : registry_.All()) call->OnTick(now, core);
}

}  // namespace ringattn::server
