#include "client/cli/attention_command.h"

#include <cstdio>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "client/cli/attention_file.h"
#include "client/cli/file_paths.h"
#include "client/cli/flag_set.h"
#include "client/cli/progress_bar.h"
#include "client/cli/region_stage.h"
#include "client/cli/report.h"
#include "client/cli/trace.h"
#include "client/transfer/tensor_bytes.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

std::string StateName(v1::RequestState state) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::RequestState_Name(state), "REQUEST_STATE_"));
}

// Keeps the process small while tensors pass through its mappings.
class PageTrimmer {
 public:
  // `fills_meanwhile`: results arrive in the output file during the download. Results that workers
  // write to a region are copied at the end.
  PageTrimmer(OpenedFiles& files, bool fills_meanwhile)
      : files_(files), fills_meanwhile_(fills_meanwhile) {}

  // Called as tensors are transferred, by one thread at a time.
  void OnProgress(const v1::Progress& progress) {
    constexpr double kTrimBytes = 64 << 20;
    if (fills_meanwhile_ && progress.state() == v1::REQUEST_STATE_DOWNLOADING) {
      files_.output->NoteFilled(progress.fraction_done());
    }
    const double moved = progress.fraction_done() * static_cast<double>(files_.tensor_bytes);
    if (progress.state() == state_ && moved - trimmed_at_ < kTrimBytes) return;
    state_ = progress.state();
    trimmed_at_ = moved;
    files_.input.ReleasePages();
    files_.output->ReleasePages();
  }

 private:
  OpenedFiles& files_;
  const bool fills_meanwhile_;
  v1::RequestState state_ = v1::REQUEST_STATE_UNSPECIFIED;
  double trimmed_at_ = 0;
};

CallResult CallServer(const AttentionFlags& flags, const Attend& attend, OpenedFiles& files) {
  const auto deadline = ParseDeadline(flags.deadline);
  if (!deadline.ok()) return deadline.status();
  ClientOptions client_options;
  client_options.channels = 1;
  client_options.channels_per_worker = flags.channels_per_worker;
  client_options.staging_bytes = flags.staging_bytes;
  auto client = flags.server.Connect(client_options);
  if (!client.ok()) return client.status();

  const auto interval = ParseProgressInterval(flags.progress_interval);
  if (!interval.ok()) return interval.status();
  const auto retain = ParseRetain(flags.retain);
  if (!retain.ok()) return retain.status();
  ProgressBar bar(*interval);
  bar.Update("connecting", -1);
  CallOptions options{.request_id = flags.request_id,
                      .retain = *retain,
                      .deadline = *deadline,
                      .with_timeline = !flags.trace.empty(),
                      .traceparent = flags.traceparent};
  SetTransport(flags.transport, &options);
  PageTrimmer trimmer(files, flags.transport != "host_memory" && flags.transport != "cuda_memory");
  options.on_progress = [&](const v1::Progress& progress) {
    trimmer.OnProgress(progress);
    bar.Update(StateName(progress.state()), progress.fraction_done());
  };
  if (*interval != absl::InfiniteDuration()) {
    options.on_accepted = [&](const v1::Accepted& accepted) {
      bar.Print(PredictionText(accepted));
    };
  }
  files.output->TouchAhead();
  return attend(**client, files, options);
}

CallResult Perform(const AttentionFlags& flags, Direction direction, const Attend& attend,
                   Problem* problem) {
  absl::Status paths = CheckFilePaths({{"--input", flags.input}},
                                      {{"--output", flags.output}, {"--trace", flags.trace}});
  if (!paths.ok()) return paths;
  for (const absl::Status& status : {ParseDeadline(flags.deadline).status(),
                                     ParseProgressInterval(flags.progress_interval).status(),
                                     ParseRetain(flags.retain).status()}) {
    if (!status.ok()) return status;
  }
  auto input = SafetensorsFile::Open(flags.input);
  if (!input.ok()) return input.status();
  if (absl::Status status = ConvertTensors(flags.input, &*input); !status.ok()) return status;
  if (absl::Status status = flags.options.Apply(problem); !status.ok()) return status;
  problem->has_dlse = flags.dlse;
  problem->lse_format = flags.lse_format;
  problem->probability_rows = flags.probability_rows;
  if (absl::Status status = ReadShape(flags.input, *input, problem); !status.ok()) return status;
  auto option_tensors = ReadOptionTensors(flags.input, *input, *problem, direction);
  if (!option_tensors.ok()) return option_tensors.status();
  auto outputs = OutputsOfProblem(*problem, direction);
  if (!outputs.ok()) return outputs.status();
  // Reserve the space for the results first, so that a full disk fails before the computation.
  auto output = CreateFor(flags.output, *problem, *outputs, true);
  if (!output.ok()) return output.status();
  auto trace = TraceFile::Open(flags.trace);
  if (!trace.ok()) return trace.status();
  OpenedFiles files{*problem,           *std::move(input),   *std::move(option_tensors),
                    *std::move(output), *std::move(outputs), 0};
  for (const TensorView& tensor : files.input.tensors()) files.tensor_bytes += tensor.bytes;

  auto report = CallServer(flags, attend, files);
  if (!report.ok()) return report;
  if (absl::Status status = files.output->Commit(); !status.ok()) return status;
  if (absl::Status status = trace->Write(*report); !status.ok()) return status;
  return report;
}

}  // namespace

void AttentionFlags::AddTo(FlagSet& command, const std::string& input_help,
                           const std::string& output_help) {
  server.AddTo(command);
  command.Add("--input", &input, input_help).Required();
  command.Add("--output", &output, output_help).Required();
  options.AddTo(command);
  AddLseFlag(command, &lse_format);
  command.Add("--deadline", &deadline,
              "Limit of the call, replays included: 30s, 5m; default: none");
  command.Add("--request_id", &request_id,
              "Id of the request, the same for every replay; default: random");
  command.Add("--traceparent", &traceparent,
              "W3C trace context of the call, 00-TRACE-PARENT-FLAGS; appears in the service's logs "
              "and in --trace");
  AddTransportFlags(command, &transport, &staging_bytes);
  AddCudaFlags(command, &cuda);
  AddChannelsFlag(command, &channels_per_worker);
  command.Add("--trace", &trace,
              "Write the timeline to this file, for chrome://tracing or ui.perfetto.dev");
  AddProgressFlag(command, &progress_interval);
  command.Add("--json", &json, "Print one JSON object (docs/cli-json.md)");
}

TensorMap<MutableBytes> OptionResults(const OpenedFiles& files) {
  TensorMap<MutableBytes> results;
  for (const v1::TensorId tensor : files.outputs) {
    if (InfoOf(static_cast<TensorId>(tensor)).is_present == nullptr) continue;
    results[tensor] = files.output->data(TensorIdName(tensor));
  }
  return results;
}

int RunAttention(const char* name, const AttentionFlags& flags, Direction direction,
                 const Attend& attend) {
  Problem problem;
  const auto report = Perform(flags, direction, attend, &problem);
  if (!report.ok()) return Fail(report.status(), flags.json);
  if (flags.json) {
    Json object = {{"command", name}, {"input", flags.input}, {"output", flags.output}};
    object.update(CallJson(problem, *report));
    Print(object);
    return kSuccess;
  }
  std::printf("wrote %s:", flags.output.c_str());
  const char* separator = " ";
  const auto outputs = OutputsOfProblem(problem, direction);
  for (const v1::TensorId tensor : *outputs) {
    std::printf("%s%s", separator, Describe(problem, tensor).c_str());
    separator = ", ";
  }
  std::printf("\n%s%s", OptionsText(problem).c_str(), CallText(*report).c_str());
  return kSuccess;
}

}  // namespace ringattn::client::cli
