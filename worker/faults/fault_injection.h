// Fault injection for tests of the whole service: decorators of the device and the ring transport
// that the worker's flag --fault_injection adds.
//
//   stall_step:N     compute calls after the N-th transfer group do not end until the
//                    ring is torn down, once: a wedged device
//   skip_send:N      the N-th transfer group is dropped: a rank that skips a step
//   fail_send:N      the N-th transfer group fails: a broken link
//   slow_step_ms:M   every compute call takes M ms longer, with steady progress: a slow rank
//   stop_reading:N   the N-th chunk of an input is not read until the ring is torn down: a
//                    live worker that does not read its shard stream
//   stop_sending:N   the outputs of one operation stop at the N-th chunk: a live worker that
//                    sends nothing
//   workspace:N      kernels need N bytes in addition to a program's buffers, as on a GPU
//
// Groups count from 0, starting with the first operation that a ring prepares; groups while a ring
// forms do not count. Chunks count from 0 over the life of the process.
//
// `holds_start`: some queues wait only for their own kind of events (a GPU's streams), so no host
// thread can block an item in them. Then the thread that starts the call or group stalls instead.
// From outside, the rank looks the same: it makes no progress.
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
  int64_t stall_step = -1;  // -1: never
  int64_t skip_send = -1;
  int64_t fail_send = -1;
  int64_t stop_reading = -1;
  int64_t stop_sending = -1;
  int64_t slow_step_ms = 0;
  int64_t workspace_bytes = 0;
};

// Returns INVALID_ARGUMENT, with the syntax, if `text` is not one of the faults above.
absl::StatusOr<FaultPlan> ParseFaultPlan(const std::string& text);

// Counts transfer groups and chunks over the life of the process. Shared by both decorators. Thread
// safe.
struct FaultState {
  FaultPlan plan;
  bool holds_start = false;
  std::atomic<bool> counts{false};  // the current ring has prepared an operation
  std::atomic<int64_t> groups_started{0};
  std::atomic<bool> aborted{false};  // the current ring was torn down
  std::atomic<bool> stalled{false};  // stall_step has occurred
  std::atomic<int64_t> chunks_read{0};
  std::atomic<int64_t> chunks_sent{0};
};

// As thread safe as the objects that they wrap.
std::unique_ptr<Device> MakeFaultyDevice(std::unique_ptr<Device> inner,
                                         std::shared_ptr<FaultState> state);
std::unique_ptr<RingTransport> MakeFaultyTransport(std::unique_ptr<RingTransport> inner,
                                                   std::shared_ptr<FaultState> state);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_FAULTS_FAULT_INJECTION_H_
