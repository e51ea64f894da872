// What a worker's device serves of a request, by what the worker said when it joined.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_WORKER_CAPABILITIES_H_
#define RINGATTN_SERVER_CORE_REQUESTS_WORKER_CAPABILITIES_H_

#include <optional>
#include <string>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "ringattn/v1/worker_control.pb.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// Whether the client would have this worker: all, unless it names its members.
bool MayServe(const PlanChoice& choice, const std::string& worker);

// Nothing if it serves the request; else UNIMPLEMENTED, OPTION_NOT_SERVED with the field that its
// device has no kernels for, or INVALID_ARGUMENT, TUNING_NOT_OFFERED with the values that it takes.
std::optional<Failure> CheckServedBy(const v1::Register& worker, const AttentionSpec& spec,
                                     const PlanChoice& choice);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_WORKER_CAPABILITIES_H_
