// The request that `bench` makes again and again: its inputs, made once, and places for results.
#ifndef RINGATTN_CLIENT_CLI_BENCH_PROBLEM_H_
#define RINGATTN_CLIENT_CLI_BENCH_PROBLEM_H_

#include <cstdint>
#include <map>
#include <vector>

#include "client/cli/flags.h"
#include "client/client.h"
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
  CallResult Forward(Client& client, const CallOptions& options, BenchResults& results) const;
  // `forward` has out and lse, and may be `results`.
  CallResult Backward(Client& client, const CallOptions& options, const BenchResults& forward,
                      BenchResults& results) const;
  // By the fp64 oracle, from so many sampled rows of each tensor.
  oracle::Report Judge(const BenchResults& results, int64_t rows, uint64_t seed) const;

 private:
  TensorMap<ConstBytes> OptionInputs() const;

  const Problem problem_;
  const AttentionSpec spec_;
  const bool backward_;
  const oracle::InputTensors inputs_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_PROBLEM_H_
