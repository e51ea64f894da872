#include "worker/direct/client_port.h"

#include <utility>
#include <vector>

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "common/wire/transport.h"
#include "worker/operation/shard_exchange.h"

namespace ringattn::worker {
namespace {

// A client opens one stream per request that this worker serves.
constexpr int kMaxStreamsPerConnection = 128;
// Closes connections without streams, so that they do not count against max_connections. Clients
// reconnect when they need one.
constexpr int kMaxConnectionIdleMs = 30'000;
// Limits what gRPC holds of incoming messages: 16 chunks of the largest size, or 256 of the
// recommended size.
constexpr size_t kMaxTransportBytes = size_t{256} << 20;

// Excludes the plugins that the process registers for all of its servers.
class NoPlugins final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->clear();
  }
};

}  // namespace

class ClientPort::Service final
    : public v1::ShardService::WithRawCallbackMethod_Exchange<v1::ShardService::Service> {
 public:
  Service(ShardAccess* access, ShardServiceHooks hooks)
      : access_(access), hooks_(std::move(hooks)) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Exchange(
      grpc::CallbackServerContext* context) override {
    // A call without a valid token is rejected here, after only its metadata has been read.
    auto* exchange = new ShardExchange(context, access_, &hooks_);  // deletes itself
    exchange->Begin();
    return exchange;
  }

 private:
  ShardAccess* const access_;
  const ShardServiceHooks hooks_;
};

absl::StatusOr<std::unique_ptr<ClientPort>> ClientPort::Start(const ClientPortOptions& options,
                                                              ShardAccess* access,
                                                              ShardServiceHooks hooks) {
  absl::StatusOr<std::unique_ptr<wire::Listener>> listener =
      wire::Listener::Bind({.address = options.listen, .max_connections = options.max_connections});
  if (!listener.ok()) {
    return absl::UnavailableError(absl::StrCat("clients: ", listener.status().message()));
  }
  std::unique_ptr<ClientPort> port(new ClientPort);
  port->listener_ = *std::move(listener);
  port->service_ = std::make_unique<Service>(access, std::move(hooks));
  grpc::ResourceQuota quota("ringattn-clients");
  quota.Resize(kMaxTransportBytes);
  grpc::ServerBuilder builder;
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(static_cast<int>(MaxServedMessageBytes(options.limits)));
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE,
                             static_cast<int>(options.limits.max_client_metadata_bytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxConnectionIdleMs);
  wire::SetTransport(&builder);
  builder.SetOption(std::make_unique<NoPlugins>());
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
  builder.RegisterService(port->service_.get());
  for (grpc::Service* service : options.services) builder.RegisterService(service);
  port->listener_->AddTo(&builder, options.security.ServerCredentials());
  port->server_ = builder.BuildAndStart();
  if (port->server_ == nullptr)
    return absl::UnavailableError("the gRPC server for clients cannot start");
  port->listener_->Start();
  return port;
}

ClientPort::~ClientPort() { Stop(std::chrono::system_clock::now()); }

void ClientPort::Stop(std::chrono::system_clock::time_point deadline) {
  if (listener_ != nullptr) listener_->Stop();
  if (server_ != nullptr) server_->Shutdown(deadline);
}

}  // namespace ringattn::worker
