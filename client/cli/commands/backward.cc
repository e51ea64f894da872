#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cli/attention_command.h"
#include "client/cli/attention_file.h"
#include "client/cli/flag_set.h"
#include "client/transfer/tensor_bytes.h"

namespace ringattn::client::cli {
namespace {

CallResult CallBackward(const AttentionFlags& flags, Client& client, OpenedFiles& files,
                        const CallOptions& options) {
  const std::string& path = flags.input;
  const Problem& problem = files.problem;
  BackwardArgs args{.shape = problem.shape,
                    .dtype = problem.dtype,
                    .output_dtype = problem.output_dtype,
                    .lse_format = problem.lse_format,
                    .options = problem.options,
                    .plan = problem.plan,
                    .residual_handle = flags.residual,
                    .keep_residual = flags.keep_residual};
  const bool has_out = files.input.Find("out") != nullptr;
  const bool has_lse = files.input.Find("lse") != nullptr;
  if (has_out != has_lse) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": backward needs both out and lse, or neither; ",
                     has_out ? "lse" : "out", " is missing"));
  }
  args.has_forward_result = has_out;
  const std::pair<v1::TensorId, ConstBytes*> inputs[] = {
      {v1::TENSOR_ID_Q, &args.q},     {v1::TENSOR_ID_K, &args.k},
      {v1::TENSOR_ID_V, &args.v},     {v1::TENSOR_ID_DOUT, &args.dout},
      {v1::TENSOR_ID_OUT, &args.out}, {v1::TENSOR_ID_LSE, &args.lse}};
  for (const auto& [tensor, target] : inputs) {
    const bool from_forward = tensor == v1::TENSOR_ID_OUT || tensor == v1::TENSOR_ID_LSE;
    if (from_forward && !args.has_forward_result) continue;
    if (!TravelsAlone(problem, tensor)) continue;
    auto bytes = ReadTensor(path, files.input, problem, tensor);
    if (!bytes.ok()) return bytes.status();
    *target = *bytes;
  }
  args.more = files.option_tensors;
  BackwardResults results{.more = OptionResults(files)};
  const std::pair<v1::TensorId, MutableBytes*> outputs[] = {{v1::TENSOR_ID_DQ, &results.dq},
                                                            {v1::TENSOR_ID_DK, &results.dk},
                                                            {v1::TENSOR_ID_DV, &results.dv}};
  for (const auto& [tensor, target] : outputs) {
    if (TravelsAlone(problem, tensor)) *target = files.output->data(TensorIdName(tensor));
  }
  return CallStaged(&client, args, results, options, flags.cuda,
                    [&](const BackwardArgs& in, const BackwardResults& out) {
                      return client.Backward(in, out, options);
                    });
}

}  // namespace

void AddBackward(FlagSet& program, Run& run) {
  auto flags = std::make_shared<AttentionFlags>();
  FlagSet& command =
      program.AddCommand("backward", "Gradients of attention in a file: dq, dk and dv");
  flags->AddTo(
      command,
      "safetensors file with q, k, v (or qkv, or q and kv), dout, sinks and dlse as the flags "
      "require, and both or neither of out and lse (neither: the workers recompute them)",
      "safetensors file to write: dq, dk, dv, or dqkv, or dq and dkv (--output_dtype); with "
      "--sinks "
      "also dsinks in fp32");
  AddDlseFlag(command, &flags->dlse);
  const Flag residual = command.Add(
      "--residual", &flags->residual,
      "Handle printed by forward --retain: send only dout and dlse. If the residual no longer "
      "exists, the file's tensors are sent, and the report has the reason");
  command.Add("--keep_residual", &flags->keep_residual, "Keep the residual for another backward")
      .Needs(residual);
  command.OnChosen([flags, &run] {
    run = [flags] {
      return RunAttention("backward", *flags, Direction::kBackward,
                          [&](Client& client, OpenedFiles& files, const CallOptions& options) {
                            return CallBackward(*flags, client, files, options);
                          });
    };
  });
}

}  // namespace ringattn::client::cli
