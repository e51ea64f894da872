// What a load test keeps of one call.
#ifndef RINGATTN_CLIENT_LOAD_CALL_SAMPLE_H_
#define RINGATTN_CLIENT_LOAD_CALL_SAMPLE_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace ringattn::client::load {

struct CallSample {
  // When the call was due: at a fixed rate its place in the schedule, whether or not there was
  // somebody free to send it (so that a service that stands still is not measured by fewer calls);
  // else its start.
  absl::Time due;
  absl::Time began;
  absl::Time ended;
  // Empty: the call succeeded. Else the code's name, and the reason where there is one:
  // "RESOURCE_EXHAUSTED QUEUE_FULL".
  std::string failure;
  // Of one that succeeded.
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
