#include "server/edge/endpoint.h"

#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <utility>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ringattn::server {
namespace {

// Larger than the registry's total limit, so that the registry's failure with code and reason
// precedes HTTP/2's silent queueing.
constexpr int kMaxStreamsPerConnection = 4096;
// An idle connection is closed by a GOAWAY, which loses no request; clients reconnect as needed.
constexpr int kMaxConnectionIdleMs = 15 * 60 * 1000;

// Installs the plugins of every gRPC server that is started afterwards.
void InitPlugins() {
  static const bool once = [] {
    // Errors in messages are reported to the client, so protobuf's own log is not needed.
    google::protobuf::SetLogHandler(nullptr);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)once;
}

void Configure(const EndpointOptions& options, const grpc::ResourceQuota& quota,
               grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(-1);
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxConnectionIdleMs);
  wire::SetTransport(builder, options.min_ping_interval);
  // Reflection is the only service with blocking calls. It uses one thread per stream, up to the
  // quota, and RESOURCE_EXHAUSTED beyond it.
  builder->SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Endpoint>> Endpoint::Start(
    const EndpointOptions& options, const grpc::ResourceQuota& quota,
    const std::vector<grpc::Service*>& services) {
  InitPlugins();
  std::unique_ptr<Endpoint> endpoint(new Endpoint);
  absl::StatusOr<std::unique_ptr<wire::Listener>> listener =
      wire::Listener::Bind({.address = options.listen, .max_connections = options.max_connections});
  if (!listener.ok()) {
    return absl::UnavailableError(absl::StrCat(options.name, ": ", listener.status().message()));
  }
  endpoint->listener_ = *std::move(listener);
  grpc::ServerBuilder builder;
  Configure(options, quota, &builder);
  for (grpc::Service* service : services) builder.RegisterService(service);
  endpoint->listener_->AddTo(&builder, options.security.ServerCredentials(options.gate));
  endpoint->server_ = builder.BuildAndStart();
  if (endpoint->server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat(options.name, ": gRPC failed to start"));
  }
  endpoint->listener_->Start();
  return endpoint;
}

Endpoint::~Endpoint() { Shutdown(absl::InfinitePast()); }

void Endpoint::SetServing(const std::string& name, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(name, serving);
}

void Endpoint::Shutdown(absl::Time deadline) {
  if (listener_ != nullptr) listener_->Stop();
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(std::max(deadline, absl::Now())));
}

}  // namespace ringattn::server
