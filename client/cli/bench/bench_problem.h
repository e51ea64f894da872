// The request that `bench` makes again and again: its inputs, made once, and places for results.
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

// Where the results of one call at a time go.
class BenchResults {
 public:
  MutableBytes Of(v1::TensorId tensor) { return absl::MakeSpan(tensors_.at(tensor)); }
  ConstBytes Of(v1::TensorId tensor) const { return tensors_.at(tensor); }
  bool Has(v1::TensorId tensor) const { return tensors_.count(tensor) > 0; }

 private:
  friend class BenchProblem;
  std::map<v1::TensorId, std::vector<uint8_t>> tensors_;
};

// Const calls may overlap.
class BenchProblem {
 public:
  // REQUIRES: `spec` is what validation makes of `problem`.
  BenchProblem(Problem problem, AttentionSpec spec, bool backward, uint64_t seed);

  const Problem& problem() const { return problem_; }
  bool backward() const { return backward_; }

  BenchResults MakeResults() const;
  ForwardArgs ForwardInputs() const;
  static ForwardResults ForwardOutputs(BenchResults& results);
  // `forward` has out and lse.
  BackwardArgs BackwardInputs(const BenchResults& forward) const;
  static BackwardResults BackwardOutputs(BenchResults& results);
  // By the fp64 oracle, from so many sampled rows of each tensor.
  oracle::Report Judge(const BenchResults& results, int64_t rows, uint64_t seed) const;

 private:
  TensorMap<ConstBytes> OptionInputs() const;

  const Problem problem_;
  const AttentionSpec spec_;
  const bool backward_;
  const oracle::InputTensors inputs_;
};

// One caller of the problem: makes its calls one after another. Tensors that are to travel by host
// or CUDA memory are staged in a region once, not for each call.
class BenchCaller {
 public:
  // All outlive the caller. `forward` has backward's out and lse, and may be the caller's own
  // results.
  BenchCaller(Client* client, const BenchProblem* problem, const CudaFlags& cuda);

  BenchResults& results() { return results_; }

  // Forward, whatever is measured, with the results in results().
  CallResult CallForward(const CallOptions& options);
  // What is measured. The results may lie in the region until Fetch.
  CallResult Call(const CallOptions& options, const BenchResults& forward);
  // The last call's results to results(). Errors: of copies from a GPU.
  absl::Status Fetch();

 private:
  Client* const client_;
  const BenchProblem* const problem_;
  const CudaFlags cuda_;  // of calls by CUDA memory
  BenchResults results_;
  std::optional<RegionStage<ForwardArgs, ForwardResults>> forward_;
  std::optional<RegionStage<BackwardArgs, BackwardResults>> backward_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_BENCH_PROBLEM_H_
