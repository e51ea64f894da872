// TransportSecurity of a client's options.
// Tests: tests/e2e/test_tls.py.
#ifndef RINGATTN_CLIENT_CALL_CLIENT_SECURITY_H_
#define RINGATTN_CLIENT_CALL_CLIENT_SECURITY_H_

#include "absl/status/statusor.h"
#include "client/api/client.h"
#include "common/security/credentials.h"

namespace ringattn::client {

// Returns the security that the tls_ fields describe; plain text if they are empty. Errors:
// INVALID_ARGUMENT, naming the field.
absl::StatusOr<TransportSecurity> SecurityOf(const ClientOptions& options);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CLIENT_SECURITY_H_
