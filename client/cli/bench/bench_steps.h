// `bench --steps`: decode steps over K/V caches that stay with the workers.
// Tests: tests/e2e/test_kv_cli.py.
#ifndef RINGATTN_CLIENT_CLI_BENCH_BENCH_STEPS_H_
#define RINGATTN_CLIENT_CLI_BENCH_BENCH_STEPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/progress_bar.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn::client::cli {

struct StepFlags {
  int steps = 0;  // 0: no steps are measured
  uint32_t layers = 2;
  std::vector<uint64_t> batches;  // empty: the shape's
  std::vector<uint64_t> lengths;  // empty: the shape's

  void AddTo(FlagSet& command);
};

// One batch size and length. Times are in seconds.
struct StepLevel {
  int64_t batch = 0;
  int64_t length = 0;  // entries of each sequence before the step
  // The worst element of the verified step: error and bound against attention in fp64.
  double error = 0, error_bound = 0;
  int64_t verified_rows = 0;

  std::vector<double> step_seconds;    // from StepBegin to the last layer's result
  std::vector<double> call_seconds;    // of single layer calls
  std::vector<double> device_seconds;  // of the slowest worker, by call
  std::vector<double> round_trips;     // of a small message by the same transport
  // Host memory: of one word between two threads of this process, which wait actively, or asleep.
  std::vector<double> word_trips_active, word_trips_asleep;
  int64_t sent_bytes = 0, received_bytes = 0;  // of one step, tensors only
  v1::KvPlacement placement;
  v1::Transport transport = v1::TRANSPORT_UNSPECIFIED;
  std::string transport_reason;

  bool passed() const { return error <= error_bound; }
  Json ToJson(uint32_t layers) const;
  // One line of the table whose head is StepTableHead.
  std::string Text(uint32_t layers) const;
};
std::string StepTableHead();

// Measures every batch size with every length. Each level creates a cache, fills it with random
// keys and values, verifies one step in fp64 on at most `rows` pairs of sequence and layer, and
// then measures `flags.steps` steps at constant length. Stops after a level whose result is wrong.
// Errors: a UsageError naming the flag; those of KvCache.
absl::StatusOr<std::vector<StepLevel>> MeasureSteps(Client* client, const Problem& problem,
                                                    const StepFlags& flags,
                                                    const std::string& transport,
                                                    absl::Duration deadline, int64_t rows,
                                                    uint64_t seed, ProgressBar& bar);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_BENCH_STEPS_H_
