// Measures a level until it is stable: window after window until the last three agree, as
// perf_analyzer does.
// Tests: load_test.cc.
#ifndef RINGATTN_CLIENT_LOAD_MEASURE_LEVEL_H_
#define RINGATTN_CLIENT_LOAD_MEASURE_LEVEL_H_

#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "client/load/level_result.h"

namespace ringattn::client::load {

inline constexpr int kStableWindows = 3;

struct Measurement {
  // A window ends when this much time has passed and this many calls have ended in it.
  absl::Duration interval = absl::Seconds(5);
  int request_count = 1;
  // Windows agree if each one's call rate and latency are within this percentage of the average of
  // the three.
  double stability_percentage = 10;
  int max_trials = 10;  // windows
  // The latency percentile that must be stable; 0: the average.
  double percentile = 0;
};

// Returns the calls that ended since the last request, once `deadline` has passed and there are
// `count`.
using TakeCalls = std::function<std::vector<CallSample>(absl::Time deadline, size_t count)>;

struct StableResult {
  LevelResult result;  // of the last three windows, or of all if there were fewer
  bool stable = false;
  int windows = 0;
  std::vector<TimeSpan> spans = {};  // the windows of `result`, in order
};

bool AreStable(const std::vector<LevelResult>& windows, double percentage);

// Takes windows until three in a row are stable or there are max_trials. Stops after a window in
// which no call succeeded.
StableResult MeasureLevel(const Measurement& measurement, const TakeCalls& take);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_MEASURE_LEVEL_H_
