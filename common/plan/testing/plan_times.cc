// Measures how long the planner takes for rings of W workers, with equally many tokens per worker.
// Prints one CSV line per case and W: the median of the rounds in milliseconds of processor time,
// and its ratio to the first W.
//
//   plan_times --workers=8,16,64,256,1024 --rounds=7
//
// Cases: a causal or a dense request, forward or backward, on one host or on hosts of eight
// workers, where the planner compares rings of all sizes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "common/plan/planner.h"

ABSL_FLAG(std::vector<std::string>, workers, (std::vector<std::string>{"8", "16", "64", "256"}),
          "Ring sizes; a service has at most 64, and the planner has no limit");
ABSL_FLAG(int, rounds, 7, "Measurements of which the median counts");
ABSL_FLAG(int64_t, tokens_per_worker, 8192, "Tokens per worker");
ABSL_FLAG(std::vector<std::string>, cases, {}, "Names of cases; all by default");

namespace ringattn {
namespace {

constexpr int kWorkersPerHost = 8;
constexpr double kSecondsPerRound = 0.02;  // short plans are repeated

struct Case {
  const char* name;
  bool causal;
  Direction direction;
  bool on_hosts;
};
constexpr Case kCases[] = {
    {"causal_forward", true, Direction::kForward, false},
    {"causal_backward", true, Direction::kBackward, false},
    {"dense_forward", false, Direction::kForward, false},
    {"dense_backward", false, Direction::kBackward, false},
    {"causal_forward_hosts", true, Direction::kForward, true},
    {"causal_backward_hosts", true, Direction::kBackward, true},
};

AttentionSpec SpecOf(const Case& c, int workers) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.num_heads = 32;
  spec.shape.num_kv_heads = 8;
  spec.shape.head_dim = spec.shape.head_dim_v = 128;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = absl::GetFlag(FLAGS_tokens_per_worker) * workers;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, spec.shape.seq_len_q};
  spec.options.causal = c.causal;
  return spec;
}

// GPUs with NVLink, and 10 GB/s from each to another host.
PlannerInputs InputsOf(const Case& c, int workers) {
  PlannerInputs inputs;
  inputs.ready_workers = workers;
  inputs.single_device_threshold_tokens = 0;
  inputs.device_flops_per_s = 6e14;
  inputs.link_bytes_per_s = 3e11;
  inputs.step_overhead_s = inputs.exchange_overhead_s = 5e-6;
  inputs.host_link_bytes_per_s = 1e10;
  inputs.host_exchange_overhead_s = 2e-5;
  for (int left = workers; c.on_hosts && left > 0; left -= kWorkersPerHost) {
    inputs.hosts.push_back({std::min(left, kWorkersPerHost), 6e14, 3e11, 5e-6, 5e-6});
  }
  return inputs;
}

// Processor time, because other processes share the machine.
double Seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Returns the median seconds of a plan; negative if it fails.
double MedianSeconds(const Case& c, int workers) {
  const AttentionSpec spec = SpecOf(c, workers);
  const PlannerInputs inputs = InputsOf(c, workers);
  std::vector<double> seconds;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    int plans = 0;
    const double begin = Seconds();
    do {
      const absl::StatusOr<Plan> plan = PlanRequest(spec, c.direction, {}, inputs);
      if (!plan.ok()) {
        std::fprintf(stderr, "%s\n", plan.status().ToString().c_str());
        return -1;
      }
      ++plans;
    } while (Seconds() - begin < kSecondsPerRound);
    seconds.push_back((Seconds() - begin) / plans);
  }
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

int Main() {
  const std::vector<std::string> wanted = absl::GetFlag(FLAGS_cases);
  std::printf("case,workers,milliseconds,ratio\n");
  for (const Case& c : kCases) {
    const bool skipped =
        !wanted.empty() && std::find(wanted.begin(), wanted.end(), c.name) == wanted.end();
    if (skipped) continue;
    double first = 0;
    for (const std::string& text : absl::GetFlag(FLAGS_workers)) {
      int workers = 0;
      if (!absl::SimpleAtoi(text, &workers) || workers < 1) {
        std::fprintf(stderr, "--workers has \"%s\", which is not a number above 0\n", text.c_str());
        return 2;
      }
      const double seconds = MedianSeconds(c, workers);
      if (seconds < 0) return 1;
      if (first == 0) first = seconds;
      std::printf("%s,%d,%.4g,%.3g\n", c.name, workers, seconds * 1e3, seconds / first);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Prints how long the planner takes for rings of many workers.");
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_rounds) < 1) {
    std::fprintf(stderr, "--rounds is %d; the minimum is 1\n", absl::GetFlag(FLAGS_rounds));
    return 2;
  }
  return ringattn::Main();
}
