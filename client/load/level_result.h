// The result of one level of a load test. Pure functions.
// Tests: load_test.cc.
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

// A time span and the calls that ended in it.
struct Window {
  absl::Time begin;
  absl::Time end;
  std::vector<CallSample> calls;
};

// Seconds, of calls that succeeded; 0 if none did.
struct Latency {
  double average = 0;
  double minimum = 0;
  double maximum = 0;
  double p50 = 0;
  double p90 = 0;
  double p95 = 0;
  double p99 = 0;
  double chosen = 0;  // the requested percentile, or the average
};

struct LevelResult {
  double seconds = 0;
  int succeeded = 0;
  std::map<std::string, int> failed;  // by failure
  int replays = 0;
  // Calls that started more than a millisecond late because no slot was free.
  int delayed = 0;
  double calls_per_second = 0;  // that succeeded
  Latency latency;
  // Averages over calls that succeeded, in seconds and bytes.
  double queue_seconds = 0;
  double upload_seconds = 0;
  double compute_seconds = 0;
  double download_seconds = 0;
  double kernel_seconds = 0;
  double bytes_up = 0;
  double bytes_down = 0;
};

// Returns the value that `percentile` percent of the values do not exceed (nearest rank). Requires
// sorted, non-empty values and 0 < percentile <= 100.
double Percentile(const std::vector<double>& sorted, double percentile);

// Summarises all windows together. `percentile` 0 chooses the average.
LevelResult Summarise(const std::vector<Window>& windows, double percentile);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_LEVEL_RESULT_H_
