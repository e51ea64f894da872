// ClientPort: the listener through which clients reach this worker's ShardService. It serves no
// reflection and no health, and accepts no secret except the tokens of operations.
#ifndef RINGATTN_WORKER_DIRECT_CLIENT_PORT_H_
#define RINGATTN_WORKER_DIRECT_CLIENT_PORT_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/server.h>

#include "absl/status/statusor.h"
#include "common/base/limits.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/listener.h"
#include "ringattn/v1/shard.grpc.pb.h"
#include "worker/operation/shard_access.h"
#include "worker/operation/shard_hooks.h"

namespace ringattn::worker {

struct ClientPortOptions {
  std::string listen;  // "host:port"; port 0 picks a free one
  TransportSecurity security;
  int64_t max_connections = 1024;
  Limits limits;
  // Served in addition to ShardService. They must outlive the port, and accept tokens only.
  std::vector<grpc::Service*> services;
};

// Thread safe.
class ClientPort {
 public:
  // Starts serving. `access` must outlive the port. Returns UNAVAILABLE if the address cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<ClientPort>> Start(const ClientPortOptions& options,
                                                           ShardAccess* access,
                                                           ShardServiceHooks hooks);
  ~ClientPort();

  const std::string& address() const { return listener_->address(); }
  wire::Listener& listener() const { return *listener_; }

  // Stops accepting connections. Open streams may continue until `deadline`. Idempotent.
  void Stop(std::chrono::system_clock::time_point deadline);

 private:
  class Service;

  ClientPort() = default;

  std::unique_ptr<Service> service_;
  std::unique_ptr<wire::Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DIRECT_CLIENT_PORT_H_
