// Metrics of the coordinator and the workers during a load test of `bench`.
// Tests: tests/e2e/test_bench_load.py.
#ifndef RINGATTN_CLIENT_CLI_BENCH_BENCH_METRICS_H_
#define RINGATTN_CLIENT_CLI_BENCH_BENCH_METRICS_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/client.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/load/measure_level.h"
#include "client/load/metrics_collector.h"

namespace ringattn::client::cli {

// perf_analyzer's --collect-metrics, --metrics-url and --metrics-interval.
struct MetricsFlags {
  bool collect = false;
  std::vector<std::string> urls;
  double interval_ms = 1000;

  // Adds each flag under its names with underscores and with dashes.
  void AddTo(FlagSet& command, const char* group);
};

// Metrics over all windows of a level, and of each window.
struct LevelMetrics {
  std::vector<load::ScrapedFigures> whole;                 // by endpoint
  std::vector<std::vector<load::ScrapedFigures>> windows;  // by window and endpoint
};

// Not thread safe, except for the scraping itself.
class BenchMetrics {
 public:
  // Errors: a UsageError naming the flag. The windows of `measurement` must be long enough for
  // scraping.
  static absl::StatusOr<BenchMetrics> Prepare(const MetricsFlags& flags,
                                              const load::Measurement& measurement);

  // Finds the endpoints and scrapes each once: those of --metrics_url, or else the coordinator's at
  // `server`'s host and those of the workers in the topology. Errors, with the URL: those of the
  // first endpoint that does not answer (load::FetchMetrics); FAILED_PRECONDITION for an endpoint
  // that is neither a coordinator's nor a worker's.
  absl::Status Find(Client& client, const std::string& server);

  // Scrapes the endpoints until the next call.
  void Begin();
  // Returns the metrics of a level measured since Begin. Errors: UNAVAILABLE, with the URL, if an
  // endpoint answered too rarely.
  absl::StatusOr<LevelMetrics> End(const load::StableResult& measured);

  // "metrics" of a level.
  Json ToJson(const LevelMetrics& level) const;
  // What all levels have in common.
  Json ToJson() const;
  // Returns a line per endpoint, each starting with `load`.
  std::string Text(const std::string& load, const LevelMetrics& level) const;
  std::string TextHead() const;
  // ",Coordinator Queue Depth Average,...". A cell lists "name:value;name:value;" for each figure.
  std::string CsvHead() const;
  std::string CsvCells(const LevelMetrics& level) const;

 private:
  struct Endpoint {
    load::HttpUrl url;
    bool is_worker = false;
    std::string name = {};  // "coordinator", or the worker's name
    std::string rank = {};  // of a worker, or "none"
    std::string device = {};
  };

  BenchMetrics() = default;
  absl::Status Describe(Endpoint& endpoint) const;
  Json Figures(const Endpoint& endpoint, const load::ScrapedFigures& figures) const;

  std::vector<load::HttpUrl> urls_;  // of the flag
  absl::Duration interval_;
  std::vector<Endpoint> endpoints_;
  std::vector<std::string> silent_;  // workers that export no metrics
  std::unique_ptr<load::MetricsCollector> collector_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_BENCH_METRICS_H_
