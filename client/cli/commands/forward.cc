#include <memory>
#include <utility>

#include "client/cli/attention_command.h"
#include "client/cli/attention_file.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {
namespace {

CallResult CallForward(const AttentionFlags& flags, Client& client, OpenedFiles& files,
                       const CallOptions& options) {
  const Problem& problem = files.problem;
  ForwardArgs args{.shape = problem.shape,
                   .dtype = problem.dtype,
                   .output_dtype = problem.output_dtype,
                   .lse_format = problem.lse_format,
                   .options = problem.options,
                   .plan = problem.plan,
                   .probability_rows = problem.probability_rows};
  const std::pair<v1::TensorId, ConstBytes*> inputs[] = {
      {v1::TENSOR_ID_Q, &args.q}, {v1::TENSOR_ID_K, &args.k}, {v1::TENSOR_ID_V, &args.v}};
  for (const auto& [tensor, target] : inputs) {
    if (!TravelsAlone(problem, tensor)) continue;
    auto bytes = ReadTensor(flags.input, files.input, problem, tensor);
    if (!bytes.ok()) return bytes.status();
    *target = *bytes;
  }
  args.more = files.option_tensors;
  const ForwardResults results{.out = files.output->data("out"),
                               .lse = files.output->data("lse"),
                               .more = OptionResults(files)};
  return CallStaged(&client, args, results, options, flags.cuda,
                    [&](const ForwardArgs& in, const ForwardResults& out) {
                      return client.Forward(in, out, options);
                    });
}

}  // namespace

void AddForward(FlagSet& program, Run& run) {
  auto flags = std::make_shared<AttentionFlags>();
  FlagSet& command = program.AddCommand("forward", "Attention of q, k, v in a file: out and lse");
  flags->AddTo(
      command,
      "safetensors file with q, k, v (or qkv, or q and kv), with --sinks also sinks (packed: "
      "cu_seqlens_q, cu_seqlens_k)",
      "safetensors file to write: out (--output_dtype), lse in fp32");
  AddProbabilitiesFlag(command, &flags->probability_rows);
  command.Add("--retain", &flags->retain,
              "Keep inputs and results at the workers for this long (30s, 10m), for backward "
              "--residual=HANDLE; prints the handle, or why nothing is kept");
  command.OnChosen([flags, &run] {
    run = [flags] {
      return RunAttention("forward", *flags, Direction::kForward,
                          [&](Client& client, OpenedFiles& files, const CallOptions& options) {
                            return CallForward(*flags, client, files, options);
                          });
    };
  });
}

}  // namespace ringattn::client::cli
