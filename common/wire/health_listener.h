// HealthListener: grpc.health.v1 alone, in plain text, on a port of its own.
//
// For what cannot speak TLS or show a certificate: Kubernetes' gRPC probes, load balancers. It
// tells whether a process lives and whether it is ready, and nothing else.
#ifndef RINGATTN_COMMON_WIRE_HEALTH_LISTENER_H_
#define RINGATTN_COMMON_WIRE_HEALTH_LISTENER_H_

#include <memory>
#include <string>

#include <grpcpp/server.h>

#include "absl/status/statusor.h"
#include "common/wire/grpc_1_51/listener.h"

namespace ringattn::wire {

// The names that every process's health service knows.
//   liveness   the process answers; to be replaced by its supervisor if not
//   readiness  it can serve: the coordinator requests, a worker its part of a ring
inline constexpr char kLivenessName[] = "liveness";
inline constexpr char kReadinessName[] = "readiness";

// Thread safe.
class HealthListener {
 public:
  // `address` is "host:port"; port 0 picks a free one. From the start kLivenessName is SERVING
  // and kReadinessName NOT_SERVING. Errors: UNAVAILABLE if the port cannot be bound.
  static absl::StatusOr<std::unique_ptr<HealthListener>> Start(const std::string& address);
  // Closes the port.
  ~HealthListener();

  // As bound.
  const std::string& address() const { return listener_->address(); }

  // Of these names it answers with SERVING or NOT_SERVING; others it does not know.
  void SetServing(const std::string& name, bool serving);

 private:
  HealthListener() = default;

  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_HEALTH_LISTENER_H_
