// What the links of a ring that has just been formed can do, measured by passing blocks
// around it. A moment's work on purpose: forming must not wait for a good figure.
#ifndef RINGATTN_WORKER_SERVICE_RING_MEASUREMENT_H_
#define RINGATTN_WORKER_SERVICE_RING_MEASUREMENT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct RingRates {
  // To the next rank while receiving from the previous one, each; 0: not measured.
  double link_bytes_per_second = 0;
  // Of a group of transfers beside its bytes.
  absl::Duration exchange_overhead;
};

// Blocks are at most this long, two of them on every member.
inline constexpr int64_t kMaxMeasuredBytes = int64_t{32} << 20;
// Idle machines need 10 ms; where more processes than cores wait for one another a group
// alone may take as long.
inline constexpr absl::Duration kMeasurementBudget = absl::Milliseconds(15);

// All members call it at the same point of the ring's life, with nothing else started:
// the same groups on every member, whose sizes and number they agree on. About 15 groups
// of at most 1.5 ms each, whatever the link's rate: short blocks tell how long the others
// may be. Busy members make it fewer groups.
//   max_block_bytes  of this member; the smallest member's counts. Below 64 KiB the rate
//                    stays unmeasured.
// A ring of one has nothing to measure and starts no group. Memory comes from `device`
// and is given back; a device without room for blocks measures shorter ones, or none.
//   budget  after which there is one more block and an end, whatever the figures are worth by
//           then; the smallest member's counts
// UNAVAILABLE if a transfer fails or `deadline` passes; then the ring is aborted, as it
// can be from any other thread meanwhile. RESOURCE_EXHAUSTED without some KiB of memory.
absl::StatusOr<RingRates> MeasureRing(Communicator& ring, Device& device, int64_t max_block_bytes,
                                      absl::Time deadline,
                                      absl::Duration budget = kMeasurementBudget);

// `time` is what a group with `bytes` to each side took, `overhead` one with next to none.
double LinkBytesPerSecond(int64_t bytes, absl::Duration time, absl::Duration overhead);

// How long a block is worth passing after `probe_bytes` took `probe_time`.
int64_t BlockBytesAfterProbe(int64_t probe_bytes, absl::Duration probe_time,
                             int64_t max_block_bytes);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RING_MEASUREMENT_H_
