// Rules for the figures and texts that workers report.
// Tests: registration_rules_test.cc.
#ifndef RINGATTN_SERVER_CORE_RING_REGISTRATION_RULES_H_
#define RINGATTN_SERVER_CORE_RING_REGISTRATION_RULES_H_

#include <string>

#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::server {

// Bytes of a worker's name, which appears in labels of metrics, in logs and in error messages.
inline constexpr size_t kMaxWorkerNameBytes = 128;
// Bytes of each of a worker's other texts: addresses, paths and names of devices and options.
inline constexpr size_t kMaxWorkerTextBytes = 512;

// Returns the rule that the registration violates, as text for the worker's log; empty if none.
// Pure.
std::string CheckRegistration(const v1::Register& registration);

// Replaces rates and times that are negative, NaN or infinite by 0, which means not measured. Pure.
v1::Committed Sanitized(v1::Committed committed);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_REGISTRATION_RULES_H_
