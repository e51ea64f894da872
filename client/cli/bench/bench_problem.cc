#include "client/cli/bench/bench_problem.h"

#include <utility>

#include "client/transfer/tensor_bytes.h"
#include "common/attention/tensors.h"

namespace ringattn::client::cli {

BenchProblem::BenchProblem(Problem problem, AttentionSpec spec, bool backward, uint64_t seed)
    : problem_(std::move(problem)),
      spec_(std::move(spec)),
      backward_(backward),
      inputs_(oracle::GenerateInputs(spec_, oracle::DataKind::kNormal, seed, backward)) {}

BenchResults BenchProblem::MakeResults() const {
  BenchResults results;
  const auto add = [&](Direction direction) {
    for (const TensorId id : OutputsOf(spec_, direction)) {
      // The problem has been validated, so the size is known.
      const auto tensor = static_cast<v1::TensorId>(id);
      results.tensors_[tensor].resize(
          *TensorBytes(problem_.shape, problem_.types(), tensor, problem_.options));
    }
  };
  add(Direction::kForward);
  if (backward_) add(Direction::kBackward);
  return results;
}

TensorMap<ConstBytes> BenchProblem::OptionInputs() const {
  TensorMap<ConstBytes> given;
  const auto add = [&](v1::TensorId tensor, ConstBytes bytes) {
    if (!bytes.empty()) given[tensor] = bytes;
  };
  add(v1::TENSOR_ID_SINKS, BytesOf(inputs_.sinks));
  add(v1::TENSOR_ID_BIAS, BytesOf(inputs_.bias));
  add(v1::TENSOR_ID_MASK, BytesOf(inputs_.mask));
  add(v1::TENSOR_ID_Q_SEGMENT_IDS, BytesOf(inputs_.q_segment_ids));
  add(v1::TENSOR_ID_KV_SEGMENT_IDS, BytesOf(inputs_.kv_segment_ids));
  return given;
}

ForwardArgs BenchProblem::ForwardInputs() const {
  return {.shape = problem_.shape,
          .dtype = problem_.dtype,
          .output_dtype = problem_.output_dtype,
          .options = problem_.options,
          .plan = problem_.plan,
          .q = BytesOf(inputs_.q),
          .k = BytesOf(inputs_.k),
          .v = BytesOf(inputs_.v),
          .more = OptionInputs()};
}

ForwardResults BenchProblem::ForwardOutputs(BenchResults& results) {
  return {.out = results.Of(v1::TENSOR_ID_OUT), .lse = results.Of(v1::TENSOR_ID_LSE)};
}

BackwardArgs BenchProblem::BackwardInputs(const BenchResults& forward) const {
  return {.shape = problem_.shape,
          .dtype = problem_.dtype,
          .output_dtype = problem_.output_dtype,
          .options = problem_.options,
          .plan = problem_.plan,
          .q = BytesOf(inputs_.q),
          .k = BytesOf(inputs_.k),
          .v = BytesOf(inputs_.v),
          .dout = BytesOf(inputs_.dout),
          .has_forward_result = true,
          .out = forward.Of(v1::TENSOR_ID_OUT),
          .lse = forward.Of(v1::TENSOR_ID_LSE),
          .more = OptionInputs()};
}

BackwardResults BenchProblem::BackwardOutputs(BenchResults& results) {
  TensorMap<MutableBytes> more;
  for (const v1::TensorId tensor : {v1::TENSOR_ID_DSINKS, v1::TENSOR_ID_DBIAS}) {
    if (results.Has(tensor)) more[tensor] = results.Of(tensor);
  }
  return {.dq = results.Of(v1::TENSOR_ID_DQ),
          .dk = results.Of(v1::TENSOR_ID_DK),
          .dv = results.Of(v1::TENSOR_ID_DV),
          .more = std::move(more)};
}

oracle::Report BenchProblem::Judge(const BenchResults& results, int64_t rows, uint64_t seed) const {
  const auto data = [&](v1::TensorId tensor) -> const uint8_t* {
    return results.Has(tensor) ? results.Of(tensor).data() : nullptr;
  };
  const auto floats = [&](v1::TensorId tensor) {
    return reinterpret_cast<const float*>(data(tensor));
  };
  const oracle::Outputs outputs{.out = data(v1::TENSOR_ID_OUT),
                                .lse = floats(v1::TENSOR_ID_LSE),
                                .dq = data(v1::TENSOR_ID_DQ),
                                .dk = data(v1::TENSOR_ID_DK),
                                .dv = data(v1::TENSOR_ID_DV),
                                .dsinks = floats(v1::TENSOR_ID_DSINKS),
                                .dbias = data(v1::TENSOR_ID_DBIAS)};
  return oracle::Verify(spec_, inputs_.view(), outputs, {}, {.rows = rows, .seed = seed});
}

BenchCaller::BenchCaller(Client* client, const BenchProblem* problem, const CudaFlags& cuda)
    : client_(client), problem_(problem), cuda_(cuda), results_(problem->MakeResults()) {}

CallResult BenchCaller::CallForward(const CallOptions& options) {
  return CallStaged(client_, problem_->ForwardInputs(), BenchProblem::ForwardOutputs(results_),
                    options, cuda_, [&](const ForwardArgs& args, const ForwardResults& results) {
                      return client_->Forward(args, results, options);
                    });
}

CallResult BenchCaller::Call(const CallOptions& options, const BenchResults& forward) {
  const bool on_cuda = options.transport == TransportPreference::kCudaMemory;
  const bool staged = on_cuda || options.transport == TransportPreference::kHostMemory;
  const CudaFlags* const cuda = on_cuda ? &cuda_ : nullptr;
  if (problem_->backward()) {
    if (!staged) {
      return client_->Backward(problem_->BackwardInputs(forward),
                               BenchProblem::BackwardOutputs(results_), options);
    }
    if (!backward_) {
      auto stage = RegionStage<BackwardArgs, BackwardResults>::Make(
          client_, problem_->BackwardInputs(forward), BenchProblem::BackwardOutputs(results_),
          cuda);
      if (!stage.ok()) return stage.status();
      backward_.emplace(*std::move(stage));
    }
    return client_->Backward(backward_->args(), backward_->results(), options);
  }
  if (!staged) {
    return client_->Forward(problem_->ForwardInputs(), BenchProblem::ForwardOutputs(results_),
                            options);
  }
  if (!forward_) {
    auto stage = RegionStage<ForwardArgs, ForwardResults>::Make(
        client_, problem_->ForwardInputs(), BenchProblem::ForwardOutputs(results_), cuda);
    if (!stage.ok()) return stage.status();
    forward_.emplace(*std::move(stage));
  }
  return client_->Forward(forward_->args(), forward_->results(), options);
}

absl::Status BenchCaller::Fetch() {
  absl::Status status;
  if (forward_) status.Update(forward_->CopyBack());
  if (backward_) status.Update(backward_->CopyBack());
  return status;
}

}  // namespace ringattn::client::cli
