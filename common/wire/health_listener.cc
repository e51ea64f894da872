#include "common/wire/health_listener.h"

#include <chrono>
#include <utility>

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "common/security/credentials.h"
#include "common/wire/transport.h"

namespace ringattn::wire {
namespace {

// Probes arrive one at a time; a few of them may hang.
constexpr int64_t kMaxConnections = 64;
constexpr int kMaxStreamsPerConnection = 16;
constexpr int kMaxMessageBytes = 4096;  // a service's name
constexpr size_t kMaxTransportBytes = size_t{8} << 20;
constexpr int kMaxThreads = 16;

}  // namespace

absl::StatusOr<std::unique_ptr<HealthListener>> HealthListener::Start(const std::string& address) {
  grpc::EnableDefaultHealthCheckService(true);
  absl::StatusOr<std::unique_ptr<Listener>> listener =
      Listener::Bind({.address = address, .max_connections = kMaxConnections});
  if (!listener.ok()) {
    return absl::UnavailableError(absl::StrCat("health: ", listener.status().message()));
  }
  std::unique_ptr<HealthListener> health(new HealthListener);
  health->listener_ = *std::move(listener);
  grpc::ResourceQuota quota("ringattn-health");
  quota.Resize(kMaxTransportBytes);
  quota.SetMaxThreads(kMaxThreads);
  grpc::ServerBuilder builder;
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  SetTransport(&builder);
  // Intentionally plain text: see the header.
  health->listener_->AddTo(&builder, TransportSecurity().ServerCredentials());
  health->server_ = builder.BuildAndStart();
  if (health->server_ == nullptr) return absl::UnavailableError("health: gRPC does not start");
  health->SetServing(kLivenessName, true);
  health->SetServing(kReadinessName, false);
  health->listener_->Start();
  return health;
}

HealthListener::~HealthListener() {
  if (listener_ != nullptr) listener_->Stop();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

void HealthListener::SetServing(const std::string& name, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(name, serving);
}

}  // namespace ringattn::wire
