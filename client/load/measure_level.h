// Measures a level until it is stable: window after window, as perf_analyzer does, until the last
// three agree.
#ifndef RINGATTN_CLIENT_LOAD_MEASURE_LEVEL_H_
#define RINGATTN_CLIENT_LOAD_MEASURE_LEVEL_H_

#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "client/load/level_result.h"

namespace ringattn::client::load {

inline constexpr int kStableWindows = 3;

struct Measurement {
  // A window ends when so much time has passed and so many calls have ended in it.
  absl::Duration interval = absl::Seconds(5);
  int request_count = 1;
  // Windows agree if the rate of calls and the latency of each are within so many percent of the
  // average of all three.
  double stability_percentage = 10;
  int max_trials = 10;  // windows
  // Whose latency counts: of 100, or 0 for the average.
  double percentile = 0;
};

// Calls that ended since it was last asked, once `deadline` has passed and there are `count`.
using TakeCalls = std::function<std::vector<CallSample>(absl::Time deadline, size_t count)>;

struct StableResult {
  LevelResult result;  // of the last three windows, or of all if there were fewer
  bool stable = false;
  int windows = 0;
  std::vector<TimeSpan> spans = {};  // the windows that `result` is of, one after another
};

bool AreStable(const std::vector<LevelResult>& windows, double percentage);

// Asks for windows until three in a row are stable or max_trials are over. A window in which no
// call succeeds ends it: more of them would not say more.
StableResult MeasureLevel(const Measurement& measurement, const TakeCalls& take);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_MEASURE_LEVEL_H_
