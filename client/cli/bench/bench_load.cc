#include "client/cli/bench/bench_load.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "client/api/error.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/report.h"
#include "client/load/load_level.h"
#include "client/load/load_range.h"
#include "common/wire/durations.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

constexpr char kLoadGroup[] = "Load (perf_analyzer's names)";
// Maximum threads and result buffers of one client process.
constexpr int kMaxInFlight = 1024;

std::string FailureOf(const absl::Status& status) {
  const std::string& reason = DetailsOf(status).reason;
  return absl::StrCat(absl::StatusCodeToString(status.code()), reason.empty() ? "" : " ", reason);
}

load::CallSample SampleOf(const CallResult& result) {
  load::CallSample sample;
  if (!result.ok()) {
    sample.failure = FailureOf(result.status());
    return sample;
  }
  const v1::Summary& summary = result->summary;
  sample.replays = static_cast<int>(summary.attempts()) - 1;
  for (const v1::StageTime& stage : summary.stages()) {
    const double seconds = ToSeconds(stage.time());
    if (stage.stage() == v1::STAGE_QUEUE) sample.queue_seconds = seconds;
    if (stage.stage() == v1::STAGE_UPLOAD) sample.upload_seconds = seconds;
    if (stage.stage() == v1::STAGE_COMPUTE) sample.compute_seconds = seconds;
    if (stage.stage() == v1::STAGE_DOWNLOAD) sample.download_seconds = seconds;
  }
  for (const v1::RankReport& rank : summary.ranks()) {
    sample.kernel_seconds = std::max(sample.kernel_seconds, ToSeconds(rank.compute_time()));
  }
  sample.bytes_up = summary.bytes_up();
  sample.bytes_down = summary.bytes_down();
  return sample;
}

// Calls overlap, so the bound is the slowest of the busiest rank's kernels, the upload and the
// download. An unknown payload rate (0) counts as free.
double BoundOf(const load::LevelResult& result, double bytes_per_second) {
  double seconds = result.kernel_seconds;
  if (bytes_per_second > 0) {
    seconds = std::max(
        {seconds, result.bytes_up / bytes_per_second, result.bytes_down / bytes_per_second});
  }
  return seconds > 0 ? 1 / seconds : 0;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat("cannot write ", path));
}

// Returns an error if WriteFile would fail, so that it is known before the measurement. Leaves the
// file as it is.
absl::Status CheckWritable(const std::string& flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  const bool existed = access(path.c_str(), F_OK) == 0;
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (file < 0) {
    return UsageError(absl::StrCat(flag, ": cannot write ", path, ": ", strerror(errno)));
  }
  close(file);
  if (!existed) unlink(path.c_str());
  return absl::OkStatus();
}

// Adds --`name`, also spelled with dashes as perf_analyzer spells it.
template <typename T>
Flag Add(FlagSet& command, const std::string& name, T* value, const char* help) {
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  return command.Add(absl::StrCat("--", name, ",--", dashed), value, help).Group(kLoadGroup);
}

}  // namespace

void LoadFlags::AddTo(FlagSet& command) {
  const Flag concurrency = Add(command, "concurrency_range", &concurrency_range_,
                               "START:END:STEP: calls in flight, one level after another");
  Add(command, "request_rate_range", &rate_range_,
      "START:END:STEP: calls started per second, whether or not earlier calls have ended. Latency "
      "counts from the time at which a call was due")
      .Excludes(concurrency);
  const Flag poisson = command
                           .AddSwitch(
                               "--poisson", [this] { poisson_ = true; },
                               "With a rate: Poisson arrivals, as from independent clients "
                               "(--request-distribution=poisson)")
                           .Group(kLoadGroup);
  Add(command, "request_distribution", &distribution_,
      "With a rate: constant (evenly spaced, the default) or poisson (as from independent clients)")
      .OneOf({"constant", "poisson"})
      .Excludes(poisson);
  Add(command, "max_threads", &max_threads_, "With a rate: maximum calls in flight")
      .InRange(1, kMaxInFlight)
      .ShowDefault();
  Add(command, "measurement_interval", &interval_ms_,
      "Minimum length of a window: a duration, or milliseconds")
      .AsMilliseconds()
      .InRange(1.0, 3.6e6)
      .ShowDefault();
  Add(command, "measurement_request_count", &request_count_, "Minimum calls that end in a window")
      .InRange(1, 1000000)
      .ShowDefault();
  Add(command, "stability_percentage", &stability_,
      "A level is stable when rate and latency of three windows are within this percentage of "
      "their "
      "average")
      .InRange(0.1, 100.0)
      .ShowDefault();
  Add(command, "max_trials", &max_trials_, "Maximum windows per level")
      .InRange(1, 1000)
      .ShowDefault();
  Add(command, "percentile", &percentile_,
      "The latency percentile for stability and threshold; default: the average")
      .InRange(1.0, 99.99);
  Add(command, "latency_threshold", &threshold_ms_,
      "A duration, or milliseconds. The first level above it is the last; it is reported but does "
      "not count")
      .AsMilliseconds()
      .Positive();
  metrics_.AddTo(command, kLoadGroup);
  Add(command, "export_csv", &csv_, "Write one line per level to this file");
  Add(command, "export_json", &json_, "Write the output of --json to this file");
}

absl::StatusOr<LoadTest> LoadTest::Prepare(const LoadFlags& flags) {
  for (const auto& [flag, path] :
       {std::pair{"--export_csv", &flags.csv_}, std::pair{"--export_json", &flags.json_}}) {
    if (absl::Status status = CheckWritable(flag, *path); !status.ok()) return status;
  }
  LoadTest test;
  test.by_rate_ = !flags.rate_range_.empty();
  test.poisson_ = flags.poisson_ || flags.distribution_ == "poisson";
  test.max_threads_ = flags.max_threads_;
  if (!test.by_rate_ && (flags.poisson_ || !flags.distribution_.empty())) {
    return UsageError(absl::StrCat(flags.poisson_ ? "--poisson" : "--request_distribution",
                                   " needs --request_rate_range"));
  }
  if (test.by_rate_) {
    auto levels = load::ParseLevels(flags.rate_range_);
    if (!levels.ok()) {
      return UsageError(absl::StrCat("--request_rate_range: ", levels.status().message()));
    }
    test.loads_ = *std::move(levels);
  } else {
    const auto levels = load::ParseWholeLevels(flags.concurrency_range_, kMaxInFlight);
    if (!levels.ok()) {
      return UsageError(absl::StrCat("--concurrency_range: ", levels.status().message()));
    }
    test.loads_.assign(levels->begin(), levels->end());
  }
  test.measurement_ = {.interval = absl::Milliseconds(flags.interval_ms_),
                       .request_count = flags.request_count_,
                       .stability_percentage = flags.stability_,
                       .max_trials = flags.max_trials_,
                       .percentile = flags.percentile_};
  if (flags.metrics_.collect) {
    auto metrics = BenchMetrics::Prepare(flags.metrics_, test.measurement_);
    if (!metrics.ok()) return metrics.status();
    test.metrics_ = *std::move(metrics);
  } else if (!flags.metrics_.urls.empty()) {
    return UsageError("--metrics_url needs --collect_metrics");
  }
  test.threshold_seconds_ = flags.threshold_ms_ / 1e3;
  test.csv_ = flags.csv_;
  test.json_ = flags.json_;
  return test;
}

int LoadTest::most_in_flight() const {
  return by_rate_ ? max_threads_ : static_cast<int>(loads_.back());
}

absl::StatusOr<LoadTest::Level> LoadTest::Measure(double load, const CallOptions& options,
                                                  const BenchResults& forward, Callers& callers,
                                                  std::vector<char>& used) {
  load::LoadShape shape;
  shape.concurrency = by_rate_ ? max_threads_ : static_cast<int>(load);
  shape.rate = by_rate_ ? load : 0;
  shape.poisson = poisson_;
  Level level;
  level.load = load;
  // Start scraping before the first window, so that rates cover all of it.
  if (metrics_) metrics_->Begin();
  absl::Mutex mutex;  // guards level.last
  {
    load::LoadLevel calls(shape, [&](int slot) {
      CallResult result = callers[slot]->Call(options, forward);
      used[slot] = result.ok() ? 1 : 0;
      load::CallSample sample = SampleOf(result);
      if (result.ok()) {
        absl::MutexLock lock(&mutex);
        level.last = *std::move(result);
      }
      return sample;
    });
    level.measured = load::MeasureLevel(measurement_, [&](absl::Time deadline, size_t count) {
      return calls.Take(deadline, count);
    });
  }
  if (!metrics_) return level;
  auto metrics = metrics_->End(level.measured);
  if (!metrics.ok()) return metrics.status();
  level.metrics = *std::move(metrics);
  return level;
}

absl::Status LoadTest::Run(Client& client, const std::string& server, const BenchProblem& problem,
                           const CallOptions& options, const BenchResults& forward,
                           PayloadBounds& bounds, int64_t rows, const CudaFlags& cuda,
                           ProgressBar& bar) {
  if (metrics_) {
    if (absl::Status status = metrics_->Find(client, server); !status.ok()) return status;
  }
  Callers callers;
  for (size_t at = 0; at < loads_.size(); ++at) {
    const double load = loads_[at];
    bar.Update(absl::StrFormat("%g %s", load, by_rate_ ? "calls/s" : "in flight"),
               static_cast<double>(at) / static_cast<double>(loads_.size()));
    const int slots = by_rate_ ? max_threads_ : static_cast<int>(load);
    while (static_cast<int>(callers.size()) < slots) {
      callers.push_back(std::make_unique<BenchCaller>(&client, &problem, cuda));
    }
    std::vector<char> used(
        callers.size(), 0);  // one element per slot, so that no two threads write to the same one
    auto measured = Measure(load, options, forward, callers, used);
    if (!measured.ok()) return measured.status();
    Level level = *std::move(measured);
    // Check results after the load as well as times.
    const auto last = std::find(used.begin(), used.end(), 1);
    if (last != used.end()) {
      BenchCaller& caller = *callers[last - used.begin()];
      if (absl::Status status = caller.Fetch(); !status.ok()) return status;
      BenchResults& judged = caller.results();
      if (problem.backward()) {
        // Judge them together with the gradients; backward does not write them.
        for (v1::TensorId tensor : {v1::TENSOR_ID_OUT, v1::TENSOR_ID_LSE}) {
          std::copy(forward.Of(tensor).begin(), forward.Of(tensor).end(),
                    judged.Of(tensor).begin());
        }
      }
      const oracle::Report verdict = problem.Judge(judged, rows, at + 2);
      if (!verdict.passed()) {
        return absl::DataLossError(absl::StrCat("at ", load, by_rate_ ? " calls/s" : " in flight",
                                                " a result is wrong:\n", verdict.ToString()));
      }
    }
    if (level.measured.result.succeeded > 0) {
      const auto payload_bound = bounds.Of(level.last);
      if (!payload_bound.ok()) return payload_bound.status();
      level.payload_bound = *payload_bound;
    }
    level.bound = BoundOf(level.measured.result, level.payload_bound.bytes_per_second);
    level.within =
        threshold_seconds_ <= 0 || (level.measured.result.succeeded > 0 &&
                                    level.measured.result.latency.chosen <= threshold_seconds_);
    levels_.push_back(std::move(level));
    if (!levels_.back().within) break;
  }
  return absl::OkStatus();
}

bool LoadTest::HasDeadLevel() const {
  return std::any_of(levels_.begin(), levels_.end(),
                     [](const Level& level) { return level.measured.result.succeeded == 0; });
}

std::string LoadTest::Chosen() const {
  return measurement_.percentile > 0 ? absl::StrFormat("p%g", measurement_.percentile) : "average";
}

std::string LoadTest::Text() const {
  std::string text = absl::StrFormat(
      "%12s %10s %8s %9s %9s %9s %9s   %s\n", by_rate_ ? "calls/s due" : "in flight", "calls/s",
      "of bound", "avg ms", "p50 ms", "p95 ms", "p99 ms", "ms of it: queue, up, compute, down");
  for (const Level& level : levels_) {
    const load::LevelResult& r = level.measured.result;
    absl::StrAppendFormat(
        &text, "%12g %10.4g %7.1f%% %9.4g %9.4g %9.4g %9.4g   %.4g, %.4g, %.4g, %.4g", level.load,
        r.calls_per_second, level.bound > 0 ? 100 * r.calls_per_second / level.bound : 0,
        1e3 * r.latency.average, 1e3 * r.latency.p50, 1e3 * r.latency.p95, 1e3 * r.latency.p99,
        1e3 * r.queue_seconds, 1e3 * r.upload_seconds, 1e3 * r.compute_seconds,
        1e3 * r.download_seconds);
    if (!level.measured.stable) {
      absl::StrAppendFormat(&text, "; not stable in %d windows", level.measured.windows);
    }
    if (r.delayed > 0) absl::StrAppendFormat(&text, "; %d started late", r.delayed);
    if (r.replays > 0) absl::StrAppendFormat(&text, "; %d replays", r.replays);
    for (const auto& [failure, count] : r.failed) {
      absl::StrAppendFormat(&text, "; %d failed: %s", count, failure);
    }
    if (!level.within) {
      absl::StrAppendFormat(&text, "; over %g ms", 1e3 * threshold_seconds_);
    }
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppend(&text,
                  "the bound: the slowest of the busiest rank's kernels, payload up and payload "
                  "down\n");
  // With --transport=auto, calls may change transport once staging memory is ready.
  std::string ways;
  for (const Level& level : levels_) {
    if (level.measured.result.succeeded == 0) continue;
    const std::string way = absl::StrCat("payload by ", ShortName(level.last.accepted.transport()),
                                         ", bound: ", level.payload_bound.Text(), "\n");
    if (!absl::StrContains(ways, way)) absl::StrAppend(&ways, way);
  }
  absl::StrAppend(&text, ways);
  if (metrics_) {
    absl::StrAppend(&text, metrics_->TextHead());
    for (const Level& level : levels_) {
      absl::StrAppend(&text, metrics_->Text(absl::StrFormat("%g", level.load), level.metrics));
    }
    absl::StrAppend(&text, "\n");
  }
  if (threshold_seconds_ > 0) {
    const Level* best = nullptr;
    for (const Level& level : levels_) {
      if (level.within) best = &level;
    }
    if (best == nullptr) {
      absl::StrAppendFormat(&text, "no level has a latency (%s) within %g ms\n", Chosen(),
                            1e3 * threshold_seconds_);
    } else {
      absl::StrAppendFormat(&text, "%g is the last level whose latency (%s) is within %g ms\n",
                            best->load, Chosen(), 1e3 * threshold_seconds_);
    }
  }
  return text;
}

Json LoadTest::ToJson() const {
  Json levels = Json::array();
  for (const Level& level : levels_) {
    const load::LevelResult& r = level.measured.result;
    Json failed = Json::object();
    for (const auto& [failure, count] : r.failed) failed[failure] = count;
    levels.push_back({{by_rate_ ? "request_rate" : "concurrency", level.load},
                      {"stable", level.measured.stable},
                      {"windows", level.measured.windows},
                      {"within_threshold", level.within},
                      {"seconds", r.seconds},
                      {"succeeded", r.succeeded},
                      {"failed", failed},
                      {"replays", r.replays},
                      {"delayed", r.delayed},
                      {"calls_per_second",
                       {{"value", r.calls_per_second},
                        {"bound", level.bound},
                        {"fraction", level.bound > 0 ? r.calls_per_second / level.bound : 0}}},
                      {"latency_seconds",
                       {{"average", r.latency.average},
                        {"minimum", r.latency.minimum},
                        {"maximum", r.latency.maximum},
                        {"p50", r.latency.p50},
                        {"p90", r.latency.p90},
                        {"p95", r.latency.p95},
                        {"p99", r.latency.p99},
                        {"chosen", r.latency.chosen}}},
                      {"stage_seconds",
                       {{"queue", r.queue_seconds},
                        {"upload", r.upload_seconds},
                        {"compute", r.compute_seconds},
                        {"download", r.download_seconds}}}});
    levels.back()["transport"] = nullptr;
    if (r.succeeded > 0) {
      levels.back()["transport"] = {{"kind", ShortName(level.last.accepted.transport())},
                                    {"reason", level.last.transport_reason},
                                    {"payload_bound", level.payload_bound.ToJson()}};
    }
    if (metrics_) levels.back()["metrics"] = metrics_->ToJson(level.metrics);
  }
  Json load = {{"mode", by_rate_ ? "request_rate" : "concurrency"},
               {"distribution", by_rate_ ? (poisson_ ? "poisson" : "constant") : ""},
               {"chosen_latency", Chosen()},
               {"latency_threshold_seconds", threshold_seconds_}};
  if (metrics_) load["metrics"] = metrics_->ToJson();
  load["levels"] = levels;
  return load;
}

std::string LoadTest::Csv() const {
  std::string text = absl::StrCat(
      by_rate_ ? "Request Rate" : "Concurrency",
      ",Calls/Second,Bound Calls/Second,Queue,Upload,Compute,Download,Avg latency,p50 latency,p90 "
      "latency,p95 latency,p99 latency,Succeeded,Failed,Replays,Delayed,Stable",
      metrics_ ? metrics_->CsvHead() : "", "\n");
  for (const Level& level : levels_) {
    const load::LevelResult& r = level.measured.result;
    int failed = 0;
    for (const auto& [failure, count] : r.failed) failed += count;
    absl::StrAppendFormat(&text, "%g,%g,%g", level.load, r.calls_per_second, level.bound);
    for (double seconds :
         {r.queue_seconds, r.upload_seconds, r.compute_seconds, r.download_seconds,
          r.latency.average, r.latency.p50, r.latency.p90, r.latency.p95, r.latency.p99}) {
      absl::StrAppendFormat(&text, ",%.0f", 1e6 * seconds);  // microseconds, as in perf_analyzer
    }
    absl::StrAppendFormat(&text, ",%d,%d,%d,%d,%d", r.succeeded, failed, r.replays, r.delayed,
                          level.measured.stable);
    absl::StrAppend(&text, metrics_ ? metrics_->CsvCells(level.metrics) : "", "\n");
  }
  return text;
}

absl::Status LoadTest::Export(const Json& whole) const {
  if (!csv_.empty()) {
    if (absl::Status status = WriteFile(csv_, Csv()); !status.ok()) return status;
  }
  if (json_.empty()) return absl::OkStatus();
  return WriteFile(json_, whole.dump(2) + "\n");
}

}  // namespace ringattn::client::cli
