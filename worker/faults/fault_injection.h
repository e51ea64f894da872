// Faults on demand, for tests of the whole service: decorators of the device and the
// transport that the worker's flag --fault_injection puts in. Without the flag none
// of this is in the way.
//
//   stall_step:N     compute calls after the N-th transfer group do not end until the
//                    ring is torn down, once: a wedged device
//   skip_send:N      the N-th transfer group is dropped: a rank that skips its step
//   fail_send:N      the N-th transfer group fails: a broken link
//   slow_step_ms:M   every compute call takes M ms longer, with steady progress: a rank
//                    that is merely slow
//   stop_reading:N   the N-th chunk of an input is not taken until the ring is torn down: a
//                    worker that lives and does not read its shard stream
//   stop_sending:N   from the N-th chunk on the outputs of one operation are not there: a
//                    worker that lives and delivers nothing
//   workspace:N      kernels need N bytes beside a program's buffers, as a GPU's do
//
// Groups count from 0, from the first operation that a ring prepares: what a ring exchanges
// while it is formed is no part of any step. Chunks count from 0 over the life of the process.
//
// Where the device's queue waits for events of its own kind only (a GPU's streams), nothing
// that a host thread ends can stand in the queue: `holds_start`. The thread that starts the
// call or the group then stalls instead; to the outside it is the same rank that does
// not get on.
#ifndef RINGATTN_WORKER_FAULTS_FAULT_INJECTION_H_
#define RINGATTN_WORKER_FAULTS_FAULT_INJECTION_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct FaultPlan {
  int64_t stall_step = -1;  // -1 = never
  int64_t skip_send = -1;
  int64_t fail_send = -1;
  int64_t stop_reading = -1;
  int64_t stop_sending = -1;
  int64_t slow_step_ms = 0;
  int64_t workspace_bytes = 0;
};

// INVALID_ARGUMENT, with the syntax, if `text` is none of the above.
absl::StatusOr<FaultPlan> ParseFaultPlan(const std::string& text);

// Counts transfer groups and chunks over the life of the process. Shared by both decorators.
struct FaultState {
  FaultPlan plan;
  bool holds_start = false;
  std::atomic<bool> counts{false};  // the current ring has prepared an operation
  std::atomic<int64_t> groups_started{0};
  std::atomic<bool> aborted{false};  // the current ring was torn down
  std::atomic<bool> stalled{false};  // stall_step has happened
  std::atomic<int64_t> chunks_read{0};
  std::atomic<int64_t> chunks_sent{0};
};

// Thread safe, like what they wrap.
std::unique_ptr<Device> MakeFaultyDevice(std::unique_ptr<Device> inner,
                                         std::shared_ptr<FaultState> state);
std::unique_ptr<RingTransport> MakeFaultyTransport(std::unique_ptr<RingTransport> inner,
                                                   std::shared_ptr<FaultState> state);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_FAULTS_FAULT_INJECTION_H_
