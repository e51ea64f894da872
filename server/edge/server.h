// Server: the coordinator process but for its command line. Two gRPC listeners
// (public; control, for workers and operators), the core's thread, and metrics.
#ifndef RINGATTN_SERVER_EDGE_SERVER_H_
#define RINGATTN_SERVER_EDGE_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/observability/metrics.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "common/wire/health_listener.h"
#include "common/wire/transport.h"
#include "server/core/coordinator.h"
#include "server/edge/access/audit_log.h"
#include "server/edge/access/callers.h"
#include "server/edge/call/request_registry.h"
#include "server/edge/data/shard_client.h"
#include "server/edge/endpoint.h"
#include "server/edge/housekeeping.h"
#include "server/edge/liveness.h"
#include "server/edge/loop/core_loop.h"
#include "server/edge/services/admin_service.h"
#include "server/edge/services/attention_service.h"
#include "server/edge/services/cluster_service.h"
#include "server/edge/services/join_service.h"
#include "server/edge/services/local_memory_service.h"
#include "server/edge/status/server_metrics.h"
#include "server/edge/status/status_board.h"
#include "server/edge/status/topology_board.h"
#include "server/identity/client_directory.h"

namespace ringattn::server {

struct ServerOptions {
  // "host:port"; port 0 picks a free one. Without metrics_listen, no metrics port; without
  // health_listen, no health port beside the health service that each gRPC listener has.
  std::string listen = "127.0.0.1:7700";
  std::string control_listen = "127.0.0.1:7701";
  std::string metrics_listen = "127.0.0.1:7702";
  std::string health_listen;
  std::string secret;
  // What protects the public listener; the control listener and the channels to workers.
  TransportSecurity client_security;
  TransportSecurity cluster_security;
  // Whom the public listener serves (server/identity/clients_file.h); empty: everybody that
  // gets through to it.
  std::string clients_file;
  // A file, "-" for standard output, or empty for none.
  std::string audit_log;
  // gRPC's own buffers, all connections together. A last resort that ends calls when
  // memory runs out, not back-pressure: flow control stays far below it.
  int64_t max_transport_bytes = 4 * kGiB;
  // Public connections at a time; 0: as DefaultMaxConnections says.
  int64_t max_connections = 0;
  // Threads of blocking calls, which only reflection has: one for each of its streams.
  int max_reflection_threads = 32;
  absl::Duration min_ping_interval = wire::kMinPingInterval;
  TopologyBoardOptions topology;
  LivenessOptions liveness;
  // The process does not answer at its own port and cannot mend it: called once, from a
  // thread of the server's, to end the process. Not called while it shuts down.
  std::function<void()> on_dead = [] {};
  CoordinatorConfig core;
};

// Of `descriptors` that the process may have: all but those for others, or half if it may
// have few, and not more than 10,000, of some 30 KiB each. The others: 256 control
// connections, 64 workers' four channels each, and 64 for metrics, logs and gRPC itself.
int64_t DefaultMaxConnections(int64_t descriptors);

// grpc.health.v1, on the public port and on the health port: wire::kLivenessName is SERVING while
// the public port takes connections, ready or not, for supervisors, which replace what is not
// alive. "", the service's own name and wire::kReadinessName say whether requests can be served.

// As bound.
struct ServerAddresses {
  std::string listen;
  std::string control;
  std::string metrics;
  std::string health;
};

// Thread safe.
class Server final : private ActionSink {
 public:
  // UNAVAILABLE if a port cannot be bound; INVALID_ARGUMENT if the clients file or the audit
  // log is of no use.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  // Ends what is left at once.
  ~Server() override;

  const ServerAddresses& addresses() const { return addresses_; }

  // Drains: new requests get UNAVAILABLE with RetryInfo, reason DRAINING; those that were
  // there go on until `timeout` and then end with UNAVAILABLE, reason SHUTTING_DOWN. Then
  // the ports close. True if nothing had to be cut off.
  bool Shutdown(absl::Duration timeout);

 private:
  Server(ServerOptions options, std::unique_ptr<ClientDirectory> directory);

  absl::Status Listen();
  std::shared_ptr<grpc::AuthMetadataProcessor> MakeGate();
  void WatchOver();
  void SetServing(bool serving);
  void SetAlive(bool alive);
  ServerStatus MakeStatus(const Coordinator& core) const;
  // Ends all requests and waits a moment for their statuses to leave.
  void CutOff();

  void CarryOut(const Action& action, const Coordinator& core) override;
  void OnTick(absl::Time now, const Coordinator& core) override;

  const ServerOptions options_;
  const wire::KeepAwake keep_awake_;
  Metrics metrics_;
  ServerMetrics server_metrics_;
  const std::unique_ptr<ClientDirectory> directory_;  // null: everybody is served
  Callers callers_;
  std::unique_ptr<AuditLog> audit_;  // null: none is kept
  CoreLoop core_;
  RequestRegistry registry_;
  ResidualHolds holds_;
  ShardChannels channels_;
  TopologyBoard board_;
  StatusBoard status_board_;
  RequestContext request_context_;
  AttentionServiceImpl attention_service_;
  ClusterServiceImpl cluster_service_;
  LocalMemoryServiceImpl local_memory_service_;
  JoinService join_service_;
  AdminServiceImpl admin_service_;
  std::unique_ptr<wire::HealthListener> health_;  // null without
  std::unique_ptr<Endpoint> public_;
  std::unique_ptr<Endpoint> control_;
  std::optional<Housekeeping> housekeeping_;
  std::optional<Liveness> liveness_;
  ServerAddresses addresses_;
  bool is_shut_down_ = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVER_H_
