// Server: the coordinator process without its command line: two gRPC listeners (public, and control
// for workers and operators), the core's thread, and metrics.
#ifndef RINGATTN_SERVER_EDGE_SERVER_H_
#define RINGATTN_SERVER_EDGE_SERVER_H_

#include <atomic>
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
#include "server/edge/call/calls_streams.h"
#include "server/edge/call/lease_holds.h"
#include "server/edge/call/request_registry.h"
#include "server/edge/data/shard_client.h"
#include "server/edge/endpoint.h"
#include "server/edge/housekeeping.h"
#include "server/edge/kv/kv_relays.h"
#include "server/edge/liveness.h"
#include "server/edge/loop/core_loop.h"
#include "server/edge/services/admin_service.h"
#include "server/edge/services/attention_service.h"
#include "server/edge/services/cluster_service.h"
#include "server/edge/services/join_service.h"
#include "server/edge/services/kv_cache_service.h"
#include "server/edge/services/local_memory_service.h"
#include "server/edge/status/server_metrics.h"
#include "server/edge/status/status_board.h"
#include "server/edge/status/topology_board.h"
#include "server/identity/client_directory.h"

namespace ringattn::server {

struct ServerOptions {
  // "host:port"; port 0 picks a free one. An empty metrics_listen disables the metrics port. An
  // empty health_listen disables the health port; each gRPC listener serves health in any case.
  std::string listen = "127.0.0.1:7700";
  std::string control_listen = "127.0.0.1:7701";
  std::string metrics_listen = "127.0.0.1:7702";
  std::string health_listen;
  std::string secret;
  // Protects the public listener; and the control listener with the channels to workers.
  TransportSecurity client_security;
  TransportSecurity cluster_security;
  // The clients that the public listener serves (server/identity/clients_file.h); empty: every
  // caller that passes transport security.
  std::string clients_file;
  // A file, "-" for standard output, or empty for none.
  std::string audit_log;
  // Bound on gRPC's buffers over all connections. It ends calls when memory runs out and is a last
  // resort; flow control stays far below it.
  int64_t max_transport_bytes = 4 * kGiB;
  // Public connections at a time; 0: DefaultMaxConnections.
  int64_t max_connections = 0;
  // Threads of blocking calls; only reflection has them, one per stream.
  int max_reflection_threads = 32;
  absl::Duration min_ping_interval = wire::kMinPingInterval;
  TopologyBoardOptions topology;
  LivenessOptions liveness;
  // The process does not answer on its public port and cannot recover. Called once, from a server
  // thread, to end the process. Not called during shutdown.
  std::function<void()> on_dead = [] {};
  CoordinatorConfig core;
};

// Returns the default for max_connections, given the process's descriptor limit. It leaves
// descriptors for 256 control connections, four channels to each of 64 workers, and 64 for metrics,
// logs and gRPC. It is at least half of a small limit, and at most 10,000 connections of about 30
// KiB each.
int64_t DefaultMaxConnections(int64_t descriptors);

// Names of grpc.health.v1 on the public port and on the health port. wire::kLivenessName is SERVING
// while the public port accepts connections, ready or not, for supervisors that restart dead
// processes. "", the service's name and wire::kReadinessName report whether requests can be served.

// The bound addresses.
struct ServerAddresses {
  std::string listen;
  std::string control;
  std::string metrics;
  std::string health;
};

// Thread safe.
class Server final : private ActionSink {
 public:
  // Returns UNAVAILABLE if a port cannot be bound, and INVALID_ARGUMENT if the clients file or the
  // audit log is unusable.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  // Ends open calls immediately.
  ~Server() override;

  const ServerAddresses& addresses() const { return addresses_; }

  // Drains: new requests fail with UNAVAILABLE (RetryInfo, reason DRAINING). Existing requests
  // continue until `timeout` and then fail with UNAVAILABLE (reason SHUTTING_DOWN). Then the ports
  // close. Returns true if no request was cut off.
  bool Shutdown(absl::Duration timeout);

 private:
  Server(ServerOptions options, std::unique_ptr<ClientDirectory> directory);

  // Runs `work` on a call, unless it is null: at once, or after the core's events if the core has
  // ended the call's inline operation. The core then knows nothing more of the request than the
  // actions that follow at once. Used by the thread that uses the core.
  template <typename Work>
  void Answer(std::shared_ptr<RequestCall> call, Work work);

  absl::Status Listen();
  std::shared_ptr<grpc::AuthMetadataProcessor> MakeGate();
  void WatchOver();
  void SetServing(bool serving);
  void SetAlive(bool alive);
  ServerStatus MakeStatus(const Coordinator& core) const;
  // Ends all requests and waits briefly until their statuses have been sent.
  void CutOff();

  void CarryOut(Action action, const Coordinator& core) override;
  void OnTick(absl::Time now, const Coordinator& core) override;

  const ServerOptions options_;
  const wire::KeepAwake keep_awake_;
  Metrics metrics_;
  ServerMetrics server_metrics_;
  const std::unique_ptr<ClientDirectory> directory_;  // null: every caller is accepted
  Callers callers_;
  std::unique_ptr<AuditLog> audit_;  // null: none
  CoreLoop core_;
  RequestRegistry registry_;
  WriterGroups writer_groups_;
  LeaseHolds residual_holds_;
  LeaseHolds kv_holds_;
  KvRelays kv_relays_;
  CallsStreams calls_streams_;
  ShardChannels channels_;
  TopologyBoard board_;
  StatusBoard status_board_;
  RequestContext request_context_;
  KvContext kv_context_;
  AttentionServiceImpl attention_service_;
  ClusterServiceImpl cluster_service_;
  LocalMemoryServiceImpl local_memory_service_;
  KvCacheServiceImpl kv_cache_service_;
  JoinService join_service_;
  AdminServiceImpl admin_service_;
  std::unique_ptr<wire::HealthListener> health_;  // null: none
  std::unique_ptr<Endpoint> public_;
  std::unique_ptr<Endpoint> control_;
  std::optional<Housekeeping> housekeeping_;
  std::optional<Liveness> liveness_;
  ServerAddresses addresses_;
  bool is_shut_down_ = false;
  // Reserved memory has changed since the last topology. Used by the core's thread.
  bool memory_changed_ = false;
  // The call whose inline operation the core has ended, from Accept to Finish. Used by the thread
  // that uses the core.
  std::shared_ptr<RequestCall> inline_call_;
  std::atomic<bool> is_ending_ = false;  // the control streams end; read by the core's thread
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVER_H_
