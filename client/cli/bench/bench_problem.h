// The request that `bench` repeats, with its inputs and buffers for results.
#ifndef RINGATTN_CLIENT_CLI_BENCH_BENCH_PROBLEM_H_
#define RINGATTN_CLIENT_CLI_BENCH_BENCH_PROBLEM_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "client/api/client.h"
#include "client/cli/flags.h"
#include "client/cli/region_stage.h"
#include "common/attention/attention_spec.h"
#include "common/oracle/generator.h"
#include "common/oracle/verify.h"

namespace ringattn::client::cli {

// Buffers for the results of one call at a time.
class BenchResults {
 public:
  MutableBytes Of(v1::TensorId tensor) { return absl::MakeSpan(tensors_.at(tensor)); }
  ConstBytes Of(v1::TensorId tensor) const { return tensors_.at(tensor); }
  bool Has(v1::TensorId tensor) const { return tensors_.count(tensor) > 0; }

 private:
  friend class BenchProblem;
  std::map<v1::TensorId, std::vector<uint8_t>> tensors_;
};

// Const methods may run concurrently.
class BenchProblem {
 public:
  // Requires the `spec` that validation derives from `problem`.
  BenchProblem(Problem problem, AttentionSpec spec, bool backward, uint64_t seed);

  const Problem& problem() const { return problem_; }
  bool backward() const { return backward_; }

  BenchResults MakeResults() const;
  ForwardArgs ForwardInputs() const;
  static ForwardResults ForwardOutputs(BenchResults& results);
  // `forward` has out and lse.
  BackwardArgs BackwardInputs(const BenchResults& forward) const;
  static BackwardResults BackwardOutputs(BenchResults& results);
  // Verifies sampled rows of each tensor with the fp64 oracle.
  oracle::Report Judge(const BenchResults& results, int64_t rows, uint64_t seed) const;

 private:
  TensorMap<ConstBytes> OptionInputs() const;

  const Problem problem_;
  const AttentionSpec spec_;
  const bool backward_;
  const oracle::InputTensors inputs_;
};

// Makes calls of the problem, one after another. Tensors for host or CUDA memory are staged in a
// region once, not per call.
class BenchCaller {
 public:
  // All arguments outlive the caller. `forward` has backward's out and lse, and may be the caller's
  // own results.
  BenchCaller(Client* client, const BenchProblem* problem, const CudaFlags& cuda);

  BenchResults& results() { return results_; }

  // Makes a forward call, whatever the benchmark measures. Results go to results().
  CallResult CallForward(const CallOptions& options);
  // Makes the measured call. Results may stay in the region until Fetch.
  CallResult Call(const CallOptions& options, const BenchResults& forward);
  // Copies the last call's results to results(). Errors: those of copies from a GPU.
  absl::Status Fetch();

 private:
  Client* const client_;
  const BenchProblem* const problem_;
  const CudaFlags cuda_;  // for calls by CUDA memory
  BenchResults results_;
  std::optional<RegionStage<ForwardArgs, ForwardResults>> forward_;
  std::optional<RegionStage<BackwardArgs, BackwardResults>> backward_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_BENCH_PROBLEM_H_
