// Checks whether a worker's device serves a request, by the worker's registration.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_WORKER_CAPABILITIES_H_
#define RINGATTN_SERVER_CORE_REQUESTS_WORKER_CAPABILITIES_H_

#include <optional>
#include <string>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "ringattn/v1/worker_control.pb.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// Returns true if the client allows this worker: all are allowed unless the request names members.
bool MayServe(const PlanChoice& choice, const std::string& worker);

// Returns nullopt if the worker serves the request. Otherwise returns UNIMPLEMENTED
// (OPTION_NOT_SERVED) with the field that its device has no kernels for, or INVALID_ARGUMENT
// (TUNING_NOT_OFFERED) with the accepted values.
std::optional<Failure> CheckServedBy(const v1::Register& worker, const AttentionSpec& spec,
                                     const PlanChoice& choice);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_WORKER_CAPABILITIES_H_
