// Converts gRPC's statuses to the library's errors.
// Tests: client/call/retry_policy_test.cc, tests/e2e/test_tls.py.
#ifndef RINGATTN_CLIENT_TRANSFER_GRPC_STATUS_H_
#define RINGATTN_CLIENT_TRANSFER_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace ringattn::client {

// Returns the same code, message and details. For a failed TLS handshake, the message names the
// option to check and the reason is kTlsHandshakeFailed.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_GRPC_STATUS_H_
