// What the coordinator and the workers export while `bench` puts a load on them.
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
#include "client/load/measure_level.h"
#include "client/load/metrics_collector.h"

namespace CLI {
class App;
}

namespace ringattn::client::cli {

// perf_analyzer's --collect-metrics, --metrics-url and --metrics-interval.
struct MetricsFlags {
  bool collect = false;
  std::vector<std::string> urls;
  double interval_ms = 1000;

  // Names with underscores and with dashes.
  void AddTo(CLI::App* command, const char* group);
};

// What was scraped in a level's windows: the whole of them, and each.
struct LevelMetrics {
  std::vector<load::ScrapedFigures> whole;                 // by endpoint
  std::vector<std::vector<load::ScrapedFigures>> windows;  // by window, by endpoint
};

// Not thread safe, but for the scraping itself.
class BenchMetrics {
 public:
  // Errors: a UsageError naming the flag. `measurement`: windows must be long enough for scrapes.
  static absl::StatusOr<BenchMetrics> Prepare(const MetricsFlags& flags,
                                              const load::Measurement& measurement);

  // Finds the endpoints: those of --metrics_url, else the coordinator's at `server`'s host and the
  // ones that the topology's workers name; and scrapes each once. Errors, naming the URL: of the
  // first that does not answer (load::FetchMetrics), and FAILED_PRECONDITION for one that is
  // neither a coordinator's nor a worker's.
  absl::Status Find(Client& client, const std::string& server);

  // From now on endpoints are scraped, until the next call.
  void Begin();
  // Of a level that was measured since. Errors: UNAVAILABLE, naming the URL, of an endpoint that
  // has answered so seldom that nothing can be said of it.
  absl::StatusOr<LevelMetrics> End(const load::StableResult& measured);

  // "metrics" of a level.
  Json ToJson(const LevelMetrics& level) const;
  // What all levels have in common.
  Json ToJson() const;
  // A line for each endpoint, each after `load`.
  std::string Text(const std::string& load, const LevelMetrics& level) const;
  std::string TextHead() const;
  // ",Coordinator Queue Depth Average,...": of each figure "name:value;name:value;".
  std::string CsvHead() const;
  std::string CsvCells(const LevelMetrics& level) const;

 private:
  struct Endpoint {
    load::HttpUrl url;
    bool is_worker = false;
    std::string name = {};  // "coordinator", or the worker's
    std::string rank = {};  // of a worker, or "none"
    std::string device = {};
  };

  BenchMetrics() = default;
  absl::Status Describe(Endpoint& endpoint) const;
  Json Figures(const Endpoint& endpoint, const load::ScrapedFigures& figures) const;

  std::vector<load::HttpUrl> urls_;  // of the flag
  absl::Duration interval_;
  std::vector<Endpoint> endpoints_;
  std::vector<std::string> silent_;  // workers that export nothing
  std::unique_ptr<load::MetricsCollector> collector_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_BENCH_METRICS_H_
