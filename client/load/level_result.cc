#include "client/load/level_result.h"

#include <algorithm>
#include <cmath>

namespace ringattn::client::load {
namespace {

Latency LatencyOf(std::vector<double> seconds, double percentile) {
  Latency latency;
  if (seconds.empty()) return latency;
  std::sort(seconds.begin(), seconds.end());
  for (double value : seconds) latency.average += value;
  latency.average /= static_cast<double>(seconds.size());
  latency.minimum = seconds.front();
  latency.maximum = seconds.back();
  latency.p50 = Percentile(seconds, 50);
  latency.p90 = Percentile(seconds, 90);
  latency.p95 = Percentile(seconds, 95);
  latency.p99 = Percentile(seconds, 99);
  latency.chosen = percentile > 0 ? Percentile(seconds, percentile) : latency.average;
  return latency;
}

}  // namespace

double Percentile(const std::vector<double>& sorted, double percentile) {
  const double rank = std::ceil(percentile / 100 * static_cast<double>(sorted.size()));
  const size_t index = rank < 1 ? 0 : static_cast<size_t>(rank) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

LevelResult Summarise(const std::vector<Window>& windows, double percentile) {
  LevelResult result;
  std::vector<double> latencies;
  for (const Window& window : windows) {
    result.seconds += absl::ToDoubleSeconds(window.end - window.begin);
    for (const CallSample& call : window.calls) {
      if (call.began - call.due > absl::Milliseconds(1)) ++result.delayed;
      if (!call.ok()) {
        ++result.failed[call.failure];
        continue;
      }
      latencies.push_back(call.latency_seconds());
      result.replays += call.replays;
      result.queue_seconds += call.queue_seconds;
      result.upload_seconds += call.upload_seconds;
      result.compute_seconds += call.compute_seconds;
      result.download_seconds += call.download_seconds;
      result.kernel_seconds += call.kernel_seconds;
      result.bytes_up += static_cast<double>(call.bytes_up);
      result.bytes_down += static_cast<double>(call.bytes_down);
    }
  }
  result.succeeded = static_cast<int>(latencies.size());
  if (result.succeeded == 0) return result;
  for (double* sum :
       {&result.queue_seconds, &result.upload_seconds, &result.compute_seconds,
        &result.download_seconds, &result.kernel_seconds, &result.bytes_up, &result.bytes_down}) {
    *sum /= result.succeeded;
  }
  if (result.seconds > 0) result.calls_per_second = result.succeeded / result.seconds;
  result.latency = LatencyOf(std::move(latencies), percentile);
  return result;
}

}  // namespace ringattn::client::load
