// A client of grpc.health.v1.
#ifndef RINGATTN_CLIENT_LAUNCHER_HEALTH_H_
#define RINGATTN_CLIENT_LAUNCHER_HEALTH_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/security/credentials.h"

namespace ringattn::client {

// Returns whether the server as a whole reports SERVING. Errors: the call's.
absl::StatusOr<bool> IsServing(const std::string& address, const TransportSecurity& security,
                               absl::Duration deadline);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_HEALTH_H_
