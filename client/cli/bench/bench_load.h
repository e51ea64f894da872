// Load tests of `bench`: levels of concurrency or of request rate, each measured until it is
// stable.
#ifndef RINGATTN_CLIENT_CLI_BENCH_BENCH_LOAD_H_
#define RINGATTN_CLIENT_CLI_BENCH_BENCH_LOAD_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/bench/bench_metrics.h"
#include "client/cli/bench/bench_problem.h"
#include "client/cli/bench/payload_bound.h"
#include "client/cli/command.h"
#include "client/cli/progress_bar.h"
#include "client/load/measure_level.h"

namespace CLI {
class App;
}

namespace ringattn::client::cli {

// perf_analyzer's flags, with its names (dashes or underscores) and meanings.
class LoadFlags {
 public:
  LoadFlags() = default;
  LoadFlags(const LoadFlags&) = delete;  // the command refers to it
  LoadFlags& operator=(const LoadFlags&) = delete;
  void AddTo(CLI::App* command);

  // A range was given: a load test is what is asked for.
  bool wanted() const { return !concurrency_range_.empty() || !rate_range_.empty(); }
  bool collects_metrics() const { return metrics_.collect; }

 private:
  friend class LoadTest;
  std::string concurrency_range_;
  std::string rate_range_;
  bool poisson_ = false;
  std::string distribution_;
  int max_threads_ = 64;
  double interval_ms_ = 5000;
  int request_count_ = 1;
  double stability_ = 10;
  int max_trials_ = 10;
  double percentile_ = 0;
  double threshold_ms_ = 0;
  std::string csv_;
  std::string json_;
  MetricsFlags metrics_;
};

// What was measured, with what it was asked for.
class LoadTest {
 public:
  // Errors: a UsageError naming the flag.
  static absl::StatusOr<LoadTest> Prepare(const LoadFlags& flags);

  // Calls in flight at most: so many connections are of use.
  int most_in_flight() const;

  // Level after level, until one is over the latency threshold, which is reported too and does not
  // count. `forward`, whose result is known to be right, has backward's out and lse; results are
  // judged again after each level. `server`: its address, where metrics are asked for. Errors: of
  // BenchMetrics, and DATA_LOSS where a result is wrong.
  absl::Status Run(Client& client, const std::string& server, const BenchProblem& problem,
                   const CallOptions& options, const BenchResults& forward, PayloadBounds& bounds,
                   int64_t rows, const CudaFlags& cuda, ProgressBar& bar);

  std::string Text() const;
  Json ToJson() const;
  // To the files that were asked for. Errors: the system's.
  absl::Status Export(const Json& whole) const;
  // Some level had calls and none that succeeded.
  bool HasDeadLevel() const;

 private:
  struct Level {
    double load = 0;
    load::StableResult measured;
    double bound = 0;            // calls per second
    CallReport last;             // of those that succeeded
    PayloadBound payload_bound;  // of its way
    bool within = true;          // the latency threshold
    LevelMetrics metrics = {};
  };

  using Callers = std::vector<std::unique_ptr<BenchCaller>>;

  absl::StatusOr<Level> Measure(double load, const CallOptions& options,
                                const BenchResults& forward, Callers& callers,
                                std::vector<char>& used);

  std::string Csv() const;
  std::string Chosen() const;

  bool by_rate_ = false;
  bool poisson_ = false;
  int max_threads_ = 1;
  std::vector<double> loads_;
  load::Measurement measurement_;
  double threshold_seconds_ = 0;
  std::string csv_;
  std::string json_;
  std::optional<BenchMetrics> metrics_;
  std::vector<Level> levels_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_BENCH_LOAD_H_
