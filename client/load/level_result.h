// What calls at one level came to. Pure.
#ifndef RINGATTN_CLIENT_LOAD_LEVEL_RESULT_H_
#define RINGATTN_CLIENT_LOAD_LEVEL_RESULT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/load/call_sample.h"

namespace ringattn::client::load {

struct TimeSpan {
  absl::Time begin;
  absl::Time end;
};

// A stretch of time and the calls that ended in it.
struct Window {
  absl::Time begin;
  absl::Time end;
  std::vector<CallSample> calls;
};

// Seconds. Of calls that succeeded; 0 where none did.
struct Latency {
  double average = 0;
  double minimum = 0;
  double maximum = 0;
  double p50 = 0;
  double p90 = 0;
  double p95 = 0;
  double p99 = 0;
  double chosen = 0;  // the percentile that was asked for, or the average
};

struct LevelResult {
  double seconds = 0;
  int succeeded = 0;
  std::map<std::string, int> failed;  // by what they failed with
  int replays = 0;
  // Began more than a millisecond after they were due, as no slot was free.
  int delayed = 0;
  double calls_per_second = 0;  // that succeeded
  Latency latency;
  // Averages of calls that succeeded, in seconds and bytes.
  double queue_seconds = 0;
  double upload_seconds = 0;
  double compute_seconds = 0;
  double download_seconds = 0;
  double kernel_seconds = 0;
  double bytes_up = 0;
  double bytes_down = 0;
};

// The value that `percentile` of 100 of the values do not exceed (nearest rank). REQUIRES: values
// are sorted and not empty; 0 < percentile <= 100.
double Percentile(const std::vector<double>& sorted, double percentile);

// Of all windows together. `percentile` 0: the average is chosen.
LevelResult Summarise(const std::vector<Window>& windows, double percentile);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_LEVEL_RESULT_H_
