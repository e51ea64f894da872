// Load tests of `bench`: levels of concurrency or request rate, each measured until it is stable.
// Tests: tests/e2e/test_bench_load.py.
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
#include "client/cli/flag_set.h"
#include "client/cli/progress_bar.h"
#include "client/load/measure_level.h"

namespace ringattn::client::cli {

// Flags with the names (dashes or underscores) and meanings of perf_analyzer's.
class LoadFlags {
 public:
  LoadFlags() = default;
  LoadFlags(const LoadFlags&) = delete;  // the flag set refers to it
  LoadFlags& operator=(const LoadFlags&) = delete;
  void AddTo(FlagSet& command);

  // Returns true if a range was given, so a load test is requested.
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

// The settings and results of a load test.
class LoadTest {
 public:
  // Errors: a UsageError naming the flag.
  static absl::StatusOr<LoadTest> Prepare(const LoadFlags& flags);

  // The maximum number of calls in flight, which is also the number of useful connections.
  int most_in_flight() const;

  // Measures level after level, up to and including the first one above the latency threshold.
  // `forward` is a verified result with backward's out and lse. Results are verified again after
  // each level. `server`: its address, for metrics. Errors: those of BenchMetrics; DATA_LOSS if a
  // result is wrong.
  absl::Status Run(Client& client, const std::string& server, const BenchProblem& problem,
                   const CallOptions& options, const BenchResults& forward, PayloadBounds& bounds,
                   int64_t rows, const CudaFlags& cuda, ProgressBar& bar);

  std::string Text() const;
  Json ToJson() const;
  // Writes the requested files. Errors: the system's.
  absl::Status Export(const Json& whole) const;
  // Returns true if in some level no call succeeded.
  bool HasDeadLevel() const;

 private:
  struct Level {
    double load = 0;
    load::StableResult measured;
    double bound = 0;            // calls per second
    CallReport last;             // the last that succeeded
    PayloadBound payload_bound;  // of the transport of `last`
    bool within = true;          // whether the latency is within the threshold
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
