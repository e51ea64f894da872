// Measures at start-up what this worker can do, for the planner's cost model. The figures are
// rough, because accurate ones would delay the start.
#ifndef RINGATTN_WORKER_MEASUREMENT_DEVICE_MEASUREMENT_H_
#define RINGATTN_WORKER_MEASUREMENT_DEVICE_MEASUREMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/plan/kernel_rate.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// The size of a measured call, large enough to keep a device busy: rows x rows.
struct MeasuredCall {
  int64_t rows = 512;
  int64_t heads = 1;           // CPU: one per thread
  bool pairs_per_head = true;  // bias and mask have one value per pair and head, else per pair
};

// Returns the rates, in floating-point operations per second, of the device's served_calls, in
// their order. Uses the calls' own times: the best of as many calls as fit into `budget` for each.
//   with_terms  size of calls with score terms, whose bias and mask have rows x rows elements,
//               and of deterministic calls: both kernels may be slow. Null: as `size`
absl::StatusOr<std::vector<KernelRate>> MeasureKernelRates(
    Device& device, const MeasuredCall& size, absl::Duration budget,
    const MeasuredCall* with_terms = nullptr);

// Returns the seconds per call of a series of calls with almost no arithmetic: the cost of host,
// queue and launch. Takes the best of as many series as fit into `budget`.
absl::StatusOr<double> MeasureCallSeconds(Device& device, absl::Duration budget);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_MEASUREMENT_DEVICE_MEASUREMENT_H_
