// Failures as clients see them: a status whose trailer `grpc-status-details-bin`
// carries google.rpc details (BadRequest, ErrorInfo, QuotaFailure, RetryInfo).
#ifndef RINGATTN_SERVER_EDGE_HEADER_ERROR_DETAILS_H_
#define RINGATTN_SERVER_EDGE_HEADER_ERROR_DETAILS_H_

#include <grpcpp/support/status.h>

#include "common/base/limits.h"
#include "common/request/violations.h"
#include "google/rpc/status.pb.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// Everything sent is printable and, details and message together, within
// Limits::max_error_detail_bytes: a longer trailer would hide the code itself.
// All functions are pure and thread safe.
grpc::Status ToGrpcStatus(const Failure& failure, const Limits& limits);
google::rpc::Status ToRpcStatus(const Failure& failure);

// ErrorInfo.reason is INVALID_REQUEST or OVER_LIMIT.
grpc::Status ToGrpcStatus(const Rejection& rejection, const Limits& limits);

// "OK", "INVALID_ARGUMENT", ...: the name that metrics and logs use. Peers may send any
// number; one that is no code is "UNKNOWN".
const char* CodeName(int code);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_HEADER_ERROR_DETAILS_H_
