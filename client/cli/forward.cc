#include <memory>

#include "client/cli/attention_command.h"
#include "client/cli/attention_file.h"

namespace ringattn::client::cli {
namespace {

CallResult CallForward(Client& client, OpenedFiles& files, const CallOptions& options) {
  const Problem& problem = files.problem;
  ForwardArgs args{.shape = problem.shape,
                   .dtype = problem.dtype,
                   .output_dtype = problem.output_dtype,
                   .options = problem.options,
                   .plan = problem.plan};
  args.q = {files.input.Find("q")->data, static_cast<size_t>(files.input.Find("q")->bytes)};
  args.k = {files.input.Find("k")->data, static_cast<size_t>(files.input.Find("k")->bytes)};
  args.v = {files.input.Find("v")->data, static_cast<size_t>(files.input.Find("v")->bytes)};
  args.more = files.option_tensors;
  return client.Forward(args,
                        ForwardResults{.out = files.output->data("out"),
                                       .lse = files.output->data("lse"),
                                       .more = OptionResults(files)},
                        options);
}

}  // namespace

void AddForward(CLI::App& app, Run& run) {
  auto flags = std::make_shared<AttentionFlags>();
  CLI::App* command = app.add_subcommand("forward", "Attention of q, k, v in a file: out and lse");
  flags->AddTo(command,
               "safetensors with q, k, v, as flags ask sinks (packed: cu_seqlens_q, cu_seqlens_k)",
               "safetensors to write: out (--output_dtype), lse in fp32");
  command->add_option("--retain", flags->retain,
                      "Keep inputs and results with the workers for this long (30s, 10m), for "
                      "backward --residual=HANDLE; the handle is printed, or why nothing is kept");
  command->callback([flags, &run] {
    run = [flags] { return RunAttention("forward", *flags, Direction::kForward, CallForward); };
  });
}

}  // namespace ringattn::client::cli
