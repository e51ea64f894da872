// Converts failures to statuses whose trailer `grpc-status-details-bin` carries google.rpc details
// (BadRequest, ErrorInfo, QuotaFailure, RetryInfo).
#ifndef RINGATTN_SERVER_EDGE_HEADER_ERROR_DETAILS_H_
#define RINGATTN_SERVER_EDGE_HEADER_ERROR_DETAILS_H_

#include <grpcpp/support/status.h>

#include "common/base/limits.h"
#include "common/request/violations.h"
#include "google/rpc/status.pb.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// The result is printable. Details and message together fit into Limits::max_error_detail_bytes,
// because a longer trailer would hide the status code. All functions are pure and thread safe.
grpc::Status ToGrpcStatus(const Failure& failure, const Limits& limits);
google::rpc::Status ToRpcStatus(const Failure& failure);

// ErrorInfo.reason is INVALID_REQUEST or OVER_LIMIT.
grpc::Status ToGrpcStatus(const Rejection& rejection, const Limits& limits);

// Returns "OK", "INVALID_ARGUMENT", ...: the name in metrics and logs. Peers may send any number;
// an unknown one is "UNKNOWN".
const char* CodeName(int code);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_HEADER_ERROR_DETAILS_H_
