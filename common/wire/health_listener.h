// HealthListener: serves only grpc.health.v1, in plain text, on a separate port.
//
// For probes that cannot use TLS or show a certificate: Kubernetes' gRPC probes and load balancers.
// It reports only whether a process is alive and whether it is ready.
#ifndef RINGATTN_COMMON_WIRE_HEALTH_LISTENER_H_
#define RINGATTN_COMMON_WIRE_HEALTH_LISTENER_H_

#include <memory>
#include <string>

#include <grpcpp/server.h>

#include "absl/status/statusor.h"
#include "common/wire/grpc_1_51/listener.h"

namespace ringattn::wire {

// The names that every process's health service knows.
//   liveness   the process responds; otherwise its supervisor should replace it
//   readiness  it can serve: the coordinator requests, a worker its rank of a ring
inline constexpr char kLivenessName[] = "liveness";
inline constexpr char kReadinessName[] = "readiness";

// Thread safe.
class HealthListener {
 public:
  // `address` is "host:port"; port 0 picks a free one. Initially kLivenessName is SERVING and
  // kReadinessName NOT_SERVING. Errors: UNAVAILABLE if the port cannot be bound.
  static absl::StatusOr<std::unique_ptr<HealthListener>> Start(const std::string& address);
  // Closes the port.
  ~HealthListener();

  // Returns "host:port" as bound.
  const std::string& address() const { return listener_->address(); }

  // Sets the response for this name to SERVING or NOT_SERVING. Names that were never set are
  // unknown.
  void SetServing(const std::string& name, bool serving);

 private:
  HealthListener() = default;

  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_HEALTH_LISTENER_H_
