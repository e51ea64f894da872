// What this worker can do, measured in a moment at start-up for the planner's cost
// model. Rough on purpose: a start must not wait for a good figure.
#ifndef RINGATTN_WORKER_SERVICE_MEASUREMENT_H_
#define RINGATTN_WORKER_SERVICE_MEASUREMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/kernel_rate.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// A call large enough to keep a device busy: rows x rows.
struct MeasuredCall {
  int64_t rows = 512;
  int64_t heads = 1;           // CPU: one per thread
  bool pairs_per_head = true;  // of a bias and a mask; else one of each for all heads
};

// Floating-point operations per second of each of the device's served_calls, in their order, by
// the calls' own times: the best of as many as fit into `budget` each.
// `with_terms`: the size of calls with score terms, whose bias and mask have rows x rows elements,
// and of deterministic ones: kernels of both may be slow. Null: the others' size.
absl::StatusOr<std::vector<KernelRate>> MeasureKernelRates(
    Device& device, const MeasuredCall& size, absl::Duration budget,
    const MeasuredCall* with_terms = nullptr);

// Seconds that a call takes whose arithmetic is next to nothing, in a row of such: what the
// host, the queue and the launch cost. The best row of as many as fit into `budget`.
absl::StatusOr<double> MeasureCallSeconds(Device& device, absl::Duration budget);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_MEASUREMENT_H_
