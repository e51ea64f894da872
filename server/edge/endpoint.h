// Endpoint: one gRPC server of the coordinator and its port.
#ifndef RINGATTN_SERVER_EDGE_ENDPOINT_H_
#define RINGATTN_SERVER_EDGE_ENDPOINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/listener.h"
#include "common/wire/transport.h"

namespace ringattn::server {

struct EndpointOptions {
  std::string name;    // "public" or "control", for messages
  std::string listen;  // "host:port"; port 0 picks a free one
  TransportSecurity security;
  // Checks every call first; may be null (TransportSecurity::ServerCredentials).
  std::shared_ptr<grpc::AuthMetadataProcessor> gate = nullptr;
  int64_t max_connections = 1024;
  int64_t max_message_bytes = 0;
  absl::Duration min_ping_interval = wire::kMinPingInterval;
};

// A server with health, reflection and the transport settings that all endpoints share. Thread
// safe.
class Endpoint {
 public:
  // Starts to serve. `services` must outlive the endpoint. `quota` bounds its buffers and
  // optionally the threads of blocking calls (reflection). Returns UNAVAILABLE if the port cannot
  // be used.
  static absl::StatusOr<std::unique_ptr<Endpoint>> Start(
      const EndpointOptions& options, const grpc::ResourceQuota& quota,
      const std::vector<grpc::Service*>& services);
  // Ends open calls immediately.
  ~Endpoint();

  const std::string& address() const { return listener_->address(); }
  wire::Listener& listener() { return *listener_; }

  // Sets the state that grpc.health.v1 reports for `name`; other names are unknown to it.
  void SetServing(const std::string& name, bool serving);

  // Closes the port. Calls may continue until `deadline` and then end with CANCELLED.
  void Shutdown(absl::Time deadline);

 private:
  Endpoint() = default;

  std::unique_ptr<wire::Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_ENDPOINT_H_
