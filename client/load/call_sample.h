// The record of one call of a load test.
#ifndef RINGATTN_CLIENT_LOAD_CALL_SAMPLE_H_
#define RINGATTN_CLIENT_LOAD_CALL_SAMPLE_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace ringattn::client::load {

struct CallSample {
  // When the call was due. At a fixed rate this is its time in the schedule, even if no slot was
  // free, so that a stalled service is not measured by fewer calls. Otherwise it is the call's
  // start.
  absl::Time due;
  absl::Time began;
  absl::Time ended;
  // Empty if the call succeeded. Otherwise the code's name, with the reason if there is one:
  // "RESOURCE_EXHAUSTED QUEUE_FULL".
  std::string failure;
  // The rest is only set for calls that succeeded.
  int replays = 0;
  double queue_seconds = 0;
  double upload_seconds = 0;
  double compute_seconds = 0;
  double download_seconds = 0;
  double kernel_seconds = 0;  // of the busiest rank
  uint64_t bytes_up = 0;
  uint64_t bytes_down = 0;

  bool ok() const { return failure.empty(); }
  double latency_seconds() const { return absl::ToDoubleSeconds(ended - due); }
};

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_CALL_SAMPLE_H_
