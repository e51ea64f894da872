// Measures the links of a newly formed ring by passing blocks around it. The figures are rough,
// because accurate ones would delay forming.
#ifndef RINGATTN_WORKER_MEASUREMENT_RING_MEASUREMENT_H_
#define RINGATTN_WORKER_MEASUREMENT_RING_MEASUREMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct RingRates {
  // To the next rank of this host while receiving from the previous one, per direction; 0: not
  // measured.
  double link_bytes_per_second = 0;
  // Fixed time of a group of transfers, in addition to its bytes.
  absl::Duration exchange_overhead;
  // The same between hosts, while all members exchange with their next ranks; 0: not measured, or
  // both neighbours are on this host.
  double host_link_bytes_per_second = 0;
  absl::Duration host_exchange_overhead;
  // The rate of all members of a host together, while each exchanges with the members in its
  // position in the next host and the previous one. The slowest host's, on all members; 0: not
  // measured.
  double host_total_bytes_per_second = 0;
};

// Maximum length of a block. Each member allocates two.
inline constexpr int64_t kMaxMeasuredBytes = int64_t{32} << 20;
// Idle machines need 10 ms. With more processes than cores, a single group may take that long.
inline constexpr absl::Duration kMeasurementBudget = absl::Milliseconds(15);
// The least budget between hosts: TCP needs several round trips until it sends at its full rate.
inline constexpr absl::Duration kHostMeasurementBudget = absl::Milliseconds(60);

// Measures the ring. All members must call it at the same point of the ring's life, with nothing
// else in flight. Members agree on the sizes and the number of groups: about 15 groups of at most
// 1.5 ms each, at any link rate, because short blocks determine how long the others may be. Busy
// members reduce the number. A ring of one starts no group. Memory comes from `device` and is
// freed; a device without room for full blocks measures shorter ones, or none.
//   max_block_bytes  this member's limit; the smallest of all members applies. Below 64 KiB
//                    the rate is not measured
//   budget           after this time, one more block is passed; the smallest of all members
//                    applies
//   hosts            by rank: ranks with the same number are on one host; empty: all are. With
//                    several hosts, the rings inside the hosts are measured first, then the ring
//                    over all hosts, with a separate budget, and then all members between hosts at
//                    once, if every host has equally many and at least two
//
// Returns UNAVAILABLE if a transfer fails or `deadline` passes. The ring is then aborted, which any
// other thread may also do at any time. Returns RESOURCE_EXHAUSTED if a few KiB cannot be
// allocated.
absl::StatusOr<RingRates> MeasureRing(Communicator& ring, Device& device, int64_t max_block_bytes,
                                      absl::Time deadline,
                                      absl::Duration budget = kMeasurementBudget,
                                      const std::vector<int>& hosts = {});

// Returns the rate of a group that moved `bytes` in each direction in `time`; `overhead` is the
// time of a group of almost no bytes.
double LinkBytesPerSecond(int64_t bytes, absl::Duration time, absl::Duration overhead);

// Long compared with an overhead of 0.1 ms, short compared with a time slice of the scheduler.
inline constexpr absl::Duration kMeasuredBlockTime = absl::Microseconds(1500);

// Returns the useful length of a block after `probe_bytes` took `probe_time`.
int64_t BlockBytesAfterProbe(int64_t probe_bytes, absl::Duration probe_time,
                             int64_t max_block_bytes,
                             absl::Duration block_time = kMeasuredBlockTime);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_MEASUREMENT_RING_MEASUREMENT_H_
