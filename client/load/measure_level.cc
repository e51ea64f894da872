#include "client/load/measure_level.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/base/monotonic_time.h"

namespace ringattn::client::load {

bool AreStable(const std::vector<LevelResult>& windows, double percentage) {
  const auto agree = [&](auto of) {
    double average = 0;
    for (const LevelResult& window : windows) average += of(window);
    average /= static_cast<double>(windows.size());
    return std::all_of(windows.begin(), windows.end(), [&](const LevelResult& window) {
      return std::abs(of(window) - average) <= percentage / 100 * average;
    });
  };
  return agree([](const LevelResult& window) { return window.calls_per_second; }) &&
         agree([](const LevelResult& window) { return window.latency.chosen; });
}

StableResult MeasureLevel(const Measurement& measurement, const TakeCalls& take) {
  std::vector<Window> windows;
  StableResult measured;
  absl::Time begin = MonotonicNow();
  while (measured.windows < measurement.max_trials) {
    Window window;
    window.begin = begin;
    window.calls = take(begin + measurement.interval,
                        static_cast<size_t>(std::max(measurement.request_count, 1)));
    window.end = begin = MonotonicNow();
    windows.push_back(std::move(window));
    ++measured.windows;
    if (windows.size() > kStableWindows) windows.erase(windows.begin());
    std::vector<LevelResult> results;
    for (const Window& each : windows) results.push_back(Summarise({each}, measurement.percentile));
    if (results.back().succeeded == 0) break;
    measured.stable =
        windows.size() == kStableWindows && AreStable(results, measurement.stability_percentage);
    if (measured.stable) break;
  }
  measured.result = Summarise(windows, measurement.percentile);
  for (const Window& window : windows) measured.spans.push_back({window.begin, window.end});
  return measured;
}

}  // namespace ringattn::client::load
