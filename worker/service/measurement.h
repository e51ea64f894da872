// What this worker can do, measured in a moment at start-up for the planner's cost
// model. Rough on purpose: a start must not wait for a good figure.
#ifndef RINGATTN_WORKER_SERVICE_MEASUREMENT_H_
#define RINGATTN_WORKER_SERVICE_MEASUREMENT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/device/device.h"

namespace ringattn {

// Floating-point operations per second of bf16 forward calls (512 x 512 rows, d 128,
// `threads` heads): the best of as many as fit into `budget`.
absl::StatusOr<double> MeasureFlopsPerSecond(Device& device, int threads, absl::Duration budget);

// Bytes per second over one TCP connection of this machine with itself at `host`,
// over the best of `budget`: what a ring of local processes gets at most.
absl::StatusOr<double> MeasureLinkBytesPerSecond(const std::string& host, absl::Duration budget);

}  // namespace ringattn

#endif  // RINGATTN_WORKER_SERVICE_MEASUREMENT_H_
