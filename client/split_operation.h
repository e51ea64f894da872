// A call that travels as several requests side by side.
#ifndef RINGATTN_CLIENT_SPLIT_OPERATION_H_
#define RINGATTN_CLIENT_SPLIT_OPERATION_H_

#include <functional>
#include <string>
#include <vector>

#include "client/call/operation.h"

namespace ringattn::client {

struct SplitRequest {
  OperationParams params;  // without `done`
  // Called once the request has succeeded, and kept until it has ended, so it may own
  // memory that the plan points to. May be empty.
  std::function<void()> collect;
};

struct SplitParams {
  std::string request_id;  // the call's
  std::vector<SplitRequest> requests;
  // As OperationParams::done, once for the call.
  std::function<void(const CallResult&)> done;
};

// Starts all requests, in order. The call ends when all of them have: with the merged
// report of all (merged_report.h), or, once one fails for good, which cancels the
// others, with its status. Cancel is for all of them. None depends on another, so they
// may queue for the workers' memory and run in any order.
// REQUIRES: at least one request.
Operation StartSplitOperation(SplitParams params);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_SPLIT_OPERATION_H_
