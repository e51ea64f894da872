// Server: the coordinator process but for its command line. Two gRPC listeners
// (public; control, for workers and operators), the core's thread, and metrics.
#ifndef RINGATTN_SERVER_EDGE_SERVER_H_
#define RINGATTN_SERVER_EDGE_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include <grpcpp/server.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/observability/metrics.h"
#include "common/security/credentials.h"
#include "server/core/coordinator.h"
#include "server/edge/admin_service.h"
#include "server/edge/attention_service.h"
#include "server/edge/cluster_service.h"
#include "server/edge/core_loop.h"
#include "server/edge/join_service.h"
#include "server/edge/request_registry.h"
#include "server/edge/server_metrics.h"
#include "server/edge/shard_client.h"
#include "server/edge/topology_board.h"

namespace ringattn::server {

struct ServerOptions {
  // "host:port"; port 0 picks a free one. Without metrics_listen, no metrics port.
  std::string listen = "127.0.0.1:7400";
  std::string control_listen = "127.0.0.1:7401";
  std::string metrics_listen = "127.0.0.1:7402";
  std::string secret;
  // What protects the public listener; the control listener and the channels to workers.
  TransportSecurity client_security;
  TransportSecurity cluster_security;
  // gRPC's own buffers, all connections together. A last resort that ends calls when
  // memory runs out, not back-pressure: flow control stays far below it.
  int64_t max_transport_bytes = 4 * kGiB;
  CoordinatorConfig core;
};

// As bound.
struct ServerAddresses {
  std::string listen;
  std::string control;
  std::string metrics;
};

// Thread safe.
class Server final : private ActionSink {
 public:
  // UNAVAILABLE if a port cannot be bound.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  // Ends what is left at once.
  ~Server() override;

  const ServerAddresses& addresses() const { return addresses_; }

  // Takes nothing new, waits for the requests in flight, but not longer than
  // `timeout`, then ends what is left. True if nothing had to be cut off.
  bool Shutdown(absl::Duration timeout);

 private:
  explicit Server(ServerOptions options);

  absl::Status Listen();
  void SetServing(bool serving);

  void CarryOut(const Action& action, const Coordinator& core) override;
  void OnTick(absl::Time now, const Coordinator& core) override;

  const ServerOptions options_;
  Metrics metrics_;
  ServerMetrics server_metrics_;
  CoreLoop core_;
  RequestRegistry registry_;
  ShardChannels channels_;
  TopologyBoard board_;
  RequestContext request_context_;
  AttentionServiceImpl attention_service_;
  ClusterServiceImpl cluster_service_;
  JoinService join_service_;
  AdminServiceImpl admin_service_;
  std::unique_ptr<grpc::Server> public_server_;
  std::unique_ptr<grpc::Server> control_server_;
  ServerAddresses addresses_;
  bool is_shut_down_ = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVER_H_
