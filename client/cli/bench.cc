#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/flags.h"
#include "client/cli/loopback_rate.h"
#include "client/cli/progress_bar.h"
#include "client/cli/region_stage.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "client/cli/trace.h"
#include "client/cli/verify_json.h"
#include "client/client.h"
#include "client/tensor_bytes.h"
#include "common/oracle/generator.h"
#include "common/oracle/verify.h"
#include "common/wire/durations.h"

namespace ringattn::client::cli {
namespace {

struct Flags {
  ServerFlags server;
  ShapeFlags shape;
  OptionFlags options;
  bool backward = false;
  int runs = 5;
  int64_t rows = 32;
  uint64_t seed = 1;
  std::string deadline;
  int streams = 1;
  std::string transport = "auto";
  std::string trace;
  bool json = false;
};

// All tensors of the measured problem, in memory.
struct Tensors {
  oracle::InputTensors inputs;
  std::map<v1::TensorId, std::vector<uint8_t>> outputs;

  MutableBytes Output(v1::TensorId tensor) { return absl::MakeSpan(outputs.at(tensor)); }
  TensorMap<ConstBytes> OptionInputs() const {
    TensorMap<ConstBytes> given;
    const auto add = [&](v1::TensorId tensor, ConstBytes bytes) {
      if (!bytes.empty()) given[tensor] = bytes;
    };
    add(v1::TENSOR_ID_SINKS, BytesOf(inputs.sinks));
    add(v1::TENSOR_ID_BIAS, BytesOf(inputs.bias));
    add(v1::TENSOR_ID_MASK, BytesOf(inputs.mask));
    add(v1::TENSOR_ID_Q_SEGMENT_IDS, BytesOf(inputs.q_segment_ids));
    add(v1::TENSOR_ID_KV_SEGMENT_IDS, BytesOf(inputs.kv_segment_ids));
    return given;
  }
};

// A figure and what it can be at most.
struct Figure {
  double value = 0;
  double bound = 0;

  Json ToJson() const {
    return {{"value", value}, {"bound", bound}, {"fraction", bound > 0 ? value / bound : 0}};
  }
};

struct Measured {
  oracle::Report verdict;
  std::vector<CallReport> reports;
  double loopback_bytes_per_second = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

template <typename Of>
double MedianOf(const std::vector<CallReport>& reports, const Of& of) {
  std::vector<double> values;
  for (const CallReport& report : reports) values.push_back(of(report));
  return Median(std::move(values));
}

double StageSeconds(const CallReport& report, v1::Stage wanted) {
  for (const v1::StageTime& stage : report.summary.stages()) {
    if (stage.stage() == wanted) return ToSeconds(stage.time());
  }
  return 0;
}

Tensors MakeTensors(const Flags& flags, const Problem& problem, const AttentionSpec& spec) {
  Tensors tensors;
  tensors.inputs =
      oracle::GenerateInputs(spec, oracle::DataKind::kNormal, flags.seed, flags.backward);
  const auto add = [&](Direction direction) {
    for (const TensorId id : OutputsOf(spec, direction)) {
      // Validated, so the size is known.
      const auto tensor = static_cast<v1::TensorId>(id);
      tensors.outputs[tensor].resize(
          *TensorBytes(problem.shape, problem.types(), tensor, problem.options));
    }
  };
  add(Direction::kForward);
  if (flags.backward) add(Direction::kBackward);
  return tensors;
}

ForwardArgs ForwardOf(const Problem& problem, Tensors& tensors) {
  return {.shape = problem.shape,
          .dtype = problem.dtype,
          .output_dtype = problem.output_dtype,
          .options = problem.options,
          .plan = problem.plan,
          .q = BytesOf(tensors.inputs.q),
          .k = BytesOf(tensors.inputs.k),
          .v = BytesOf(tensors.inputs.v),
          .more = tensors.OptionInputs()};
}

ForwardResults ForwardResultsOf(Tensors& tensors) {
  return {.out = tensors.Output(v1::TENSOR_ID_OUT), .lse = tensors.Output(v1::TENSOR_ID_LSE)};
}

BackwardArgs BackwardOf(const Problem& problem, Tensors& tensors) {
  return {.shape = problem.shape,
          .dtype = problem.dtype,
          .output_dtype = problem.output_dtype,
          .options = problem.options,
          .plan = problem.plan,
          .q = BytesOf(tensors.inputs.q),
          .k = BytesOf(tensors.inputs.k),
          .v = BytesOf(tensors.inputs.v),
          .dout = BytesOf(tensors.inputs.dout),
          .has_forward_result = true,
          .out = tensors.Output(v1::TENSOR_ID_OUT),
          .lse = tensors.Output(v1::TENSOR_ID_LSE),
          .more = tensors.OptionInputs()};
}

BackwardResults BackwardResultsOf(Tensors& tensors) {
  TensorMap<MutableBytes> more;
  for (const v1::TensorId tensor : {v1::TENSOR_ID_DSINKS, v1::TENSOR_ID_DBIAS}) {
    if (tensors.outputs.count(tensor) > 0) more[tensor] = tensors.Output(tensor);
  }
  return {.dq = tensors.Output(v1::TENSOR_ID_DQ),
          .dk = tensors.Output(v1::TENSOR_ID_DK),
          .dv = tensors.Output(v1::TENSOR_ID_DV),
          .more = std::move(more)};
}

// The calls that are measured; with tensors in a region they are staged once, not for each.
class MeasuredCall {
 public:
  MeasuredCall(Client* client, const Flags& flags, const Problem& problem, Tensors* tensors)
      : client_(client), flags_(flags), problem_(problem), tensors_(tensors) {}

  // What is verified: forward and, if that is measured, backward on its results.
  CallResult First(const CallOptions& options) {
    auto report =
        CallStaged(*client_, ForwardOf(problem_, *tensors_), ForwardResultsOf(*tensors_), options);
    if (!report.ok() || !flags_.backward) return report;
    return CallStaged(*client_, BackwardOf(problem_, *tensors_), BackwardResultsOf(*tensors_),
                      options);
  }

  absl::Status Stage(const CallOptions& options) {
    if (options.transport != TransportWish::kHost) return absl::OkStatus();
    if (flags_.backward)
      return Keep(&backward_, BackwardOf(problem_, *tensors_), BackwardResultsOf(*tensors_));
    return Keep(&forward_, ForwardOf(problem_, *tensors_), ForwardResultsOf(*tensors_));
  }

  CallResult Again(const CallOptions& options) {
    if (forward_.has_value()) {
      return client_->Forward(forward_->args(), forward_->results(), options);
    }
    if (backward_.has_value()) {
      return client_->Backward(backward_->args(), backward_->results(), options);
    }
    if (flags_.backward) {
      return client_->Backward(BackwardOf(problem_, *tensors_), BackwardResultsOf(*tensors_),
                               options);
    }
    return client_->Forward(ForwardOf(problem_, *tensors_), ForwardResultsOf(*tensors_), options);
  }

 private:
  template <typename Args, typename Results>
  absl::Status Keep(std::optional<RegionStage<Args, Results>>* kept, const Args& args,
                    const Results& results) {
    auto stage = RegionStage<Args, Results>::Make(client_, args, results);
    if (!stage.ok()) return stage.status();
    kept->emplace(*std::move(stage));
    return absl::OkStatus();
  }

  Client* const client_;
  const Flags& flags_;
  const Problem& problem_;
  Tensors* const tensors_;
  std::optional<RegionStage<ForwardArgs, ForwardResults>> forward_;
  std::optional<RegionStage<BackwardArgs, BackwardResults>> backward_;
};

oracle::Report Judge(const Flags& flags, const AttentionSpec& spec, Tensors& tensors) {
  const auto data = [&](v1::TensorId tensor) -> const uint8_t* {
    const auto found = tensors.outputs.find(tensor);
    return found == tensors.outputs.end() ? nullptr : found->second.data();
  };
  const oracle::Outputs outputs{
      .out = data(v1::TENSOR_ID_OUT),
      .lse = reinterpret_cast<const float*>(data(v1::TENSOR_ID_LSE)),
      .dq = data(v1::TENSOR_ID_DQ),
      .dk = data(v1::TENSOR_ID_DK),
      .dv = data(v1::TENSOR_ID_DV),
      .dsinks = reinterpret_cast<const float*>(data(v1::TENSOR_ID_DSINKS))};
  return oracle::Verify(spec, tensors.inputs.view(), outputs, {},
                        {.rows = flags.rows, .seed = flags.seed});
}

absl::StatusOr<Measured> Measure(const Flags& flags, const Problem& problem,
                                 const AttentionSpec& spec) {
  const auto deadline = ParseDeadline(flags.deadline);
  if (!deadline.ok()) return deadline.status();
  auto client = flags.server.Connect({.channels = flags.streams});
  if (!client.ok()) return client.status();
  auto trace = TraceFile::Open(flags.trace);
  if (!trace.ok()) return trace.status();
  ProgressBar bar;
  bar.Update("making inputs", -1);
  Tensors tensors = MakeTensors(flags, problem, spec);
  CallOptions options{.streams = flags.streams, .deadline = *deadline};
  SetTransport(flags.transport, &options);
  MeasuredCall call(client->get(), flags, problem, &tensors);

  Measured measured;
  bar.Update("first run", -1);
  auto report = call.First(options);
  if (!report.ok()) return report.status();
  bar.Update("verifying", -1);
  measured.verdict = Judge(flags, spec, tensors);
  if (!measured.verdict.passed()) return measured;

  if (absl::Status status = call.Stage(options); !status.ok()) return status;
  for (int run = 0; run < flags.runs; ++run) {
    bar.Update("measuring", static_cast<double>(run) / flags.runs);
    options.with_timeline = !flags.trace.empty() && run == flags.runs - 1;
    report = call.Again(options);
    if (!report.ok()) return report.status();
    measured.reports.push_back(*std::move(report));
  }
  // Enough to outlast the connection's slow start, not so much that it takes long.
  const uint64_t payload = measured.reports.back().summary.bytes_up();
  const int64_t probe = std::clamp<int64_t>(payload, 256 << 20, 1 << 30);
  const auto loopback =
      LoopbackBytesPerSecond(probe, static_cast<int>(measured.reports.back().streams()));
  if (!loopback.ok()) return loopback.status();
  measured.loopback_bytes_per_second = *loopback;
  if (absl::Status status = trace->Write(measured.reports.back()); !status.ok()) return status;
  return measured;
}

struct Figures {
  double seconds_median = 0, seconds_min = 0, seconds_max = 0;
  Figure tokens_per_second, flops_per_second, upload, payload;
};

Figures Summarise(const Problem& problem, const Measured& measured) {
  const std::vector<CallReport>& reports = measured.reports;
  const auto seconds = [](const CallReport& report) { return report.times.finished_seconds; };
  const auto by_seconds = [&](const CallReport& a, const CallReport& b) {
    return seconds(a) < seconds(b);
  };
  Figures figures;
  figures.seconds_median = MedianOf(reports, seconds);
  figures.seconds_min = seconds(*std::min_element(reports.begin(), reports.end(), by_seconds));
  figures.seconds_max = seconds(*std::max_element(reports.begin(), reports.end(), by_seconds));

  // The kernels' own time on the busiest rank: what is left if nothing ever waits.
  const double kernel_seconds = MedianOf(reports, [](const CallReport& report) {
    double busiest = 0;
    for (const v1::RankReport& rank : report.summary.ranks()) {
      busiest = std::max(busiest, ToSeconds(rank.compute_time()));
    }
    return busiest;
  });
  const double compute_seconds =
      MedianOf(reports, [](const CallReport& r) { return ToSeconds(r.summary.compute_time()); });
  const v1::Summary& last = reports.back().summary;
  const auto ratio = [](double a, double b) { return b > 0 ? a / b : 0; };
  figures.flops_per_second = {ratio(last.flops(), compute_seconds),
                              ratio(last.flops(), kernel_seconds)};
  const double wire = measured.loopback_bytes_per_second;
  figures.upload = {
      ratio(
          last.bytes_up(),
          MedianOf(reports, [](const CallReport& r) { return StageSeconds(r, v1::STAGE_UPLOAD); })),
      wire};
  // Both ways, over all time that is neither queue nor compute: what the coordinator
  // calls download ends when the last byte is written, not when it has arrived. Of
  // several streams, whose stages overlap, over all time.
  const double wire_seconds = MedianOf(reports, [](const CallReport& r) {
    if (r.streams() > 1) return r.times.finished_seconds;
    return r.times.finished_seconds - StageSeconds(r, v1::STAGE_QUEUE) -
           ToSeconds(r.summary.compute_time());
  });
  figures.payload = {ratio(last.bytes_up() + last.bytes_down(), wire_seconds), wire};
  const double tokens =
      static_cast<double>(problem.shape.batch()) * static_cast<double>(problem.shape.seq_len_q());
  const double up_seconds = static_cast<double>(last.bytes_up()) / wire;
  const double down_seconds = static_cast<double>(last.bytes_down()) / wire;
  const double bound_seconds = reports.back().streams() > 1
                                   ? std::max({kernel_seconds, up_seconds, down_seconds})
                                   : kernel_seconds + up_seconds + down_seconds;
  figures.tokens_per_second = {ratio(tokens, figures.seconds_median), ratio(tokens, bound_seconds)};
  return figures;
}

void PrintFigure(const char* name, const Figure& figure, double unit, const char* unit_name,
                 const char* bound) {
  std::printf("%-10s %12.4g %-8s %12.4g  %5.1f%%  %s\n", name, figure.value / unit, unit_name,
              figure.bound / unit, figure.bound > 0 ? 100 * figure.value / figure.bound : 0, bound);
}

void PrintText(const Flags& flags, const Measured& measured, const Figures& figures) {
  const v1::PlanReport& plan = measured.reports.back().accepted.plan();
  std::printf("%s\n%s, %s, %u members: %s\n", measured.verdict.ToString().c_str(),
              ShortName(plan.schedule()).c_str(), ShortName(plan.layout()).c_str(),
              plan.world_size(), plan.reason().c_str());
  std::printf("%s, %d runs after the verified one: median %.4f s (%.4f to %.4f)\n\n",
              flags.backward ? "backward" : "forward", flags.runs, figures.seconds_median,
              figures.seconds_min, figures.seconds_max);
  const size_t streams = measured.reports.back().streams();
  if (streams > 1) std::printf("%zu streams; bounds with as many TCP connections\n", streams);
  std::printf("%-10s %12s %-8s %12s  %6s  %s\n", "", "measured", "", "bound", "", "the bound is");
  PrintFigure("call", figures.tokens_per_second, 1, "tokens/s",
              streams > 1 ? "the slowest of the busiest rank's kernels and, at the loopback rate, "
                            "payload up and payload down"
                          : "kernel time of the busiest rank + payload at the loopback rate");
  PrintFigure("compute", figures.flops_per_second, 1e9, "GFLOP/s",
              "the busiest rank's kernels without any wait");
  PrintFigure("upload", figures.upload, 1e9, "GB/s",
              "plain TCP over loopback, a connection for each stream");
  PrintFigure("payload", figures.payload, 1e9, "GB/s",
              streams > 1 ? "the same (both ways, over all time)"
                          : "the same (both ways, over all time but queue and compute)");
}

int RunBench(const Flags& flags) {
  Problem problem;
  if (absl::Status status = flags.shape.Apply(&problem); !status.ok()) {
    return Fail(status, flags.json);
  }
  if (absl::Status status = flags.options.Apply(&problem); !status.ok()) {
    return Fail(status, flags.json);
  }
  const auto valid = ValidateLocally(
      problem, flags.backward ? Direction::kBackward : Direction::kForward, flags.backward);
  if (!valid.ok()) return Fail(valid.status(), flags.json);
  const auto measured = Measure(flags, problem, valid->spec);
  if (!measured.ok()) return Fail(measured.status(), flags.json);
  if (!measured->verdict.passed()) {
    if (flags.json) {
      Print({{"command", "bench"}, {"verified", ReportJson(measured->verdict)}});
    } else {
      std::printf("%sMISMATCH: nothing was measured\n", measured->verdict.ToString().c_str());
    }
    return kMismatch;
  }
  const Figures figures = Summarise(problem, *measured);
  if (!flags.json) {
    PrintText(flags, *measured, figures);
    return kSuccess;
  }
  Json object = {{"command", "bench"},
                 {"direction", flags.backward ? "backward" : "forward"},
                 {"verified", ReportJson(measured->verdict)},
                 {"runs", flags.runs},
                 {"seconds",
                  {{"median", figures.seconds_median},
                   {"min", figures.seconds_min},
                   {"max", figures.seconds_max}}},
                 {"tokens_per_second", figures.tokens_per_second.ToJson()},
                 {"compute_flops_per_second", figures.flops_per_second.ToJson()},
                 {"upload_bytes_per_second", figures.upload.ToJson()},
                 {"payload_bytes_per_second", figures.payload.ToJson()},
                 {"loopback_bytes_per_second", measured->loopback_bytes_per_second},
                 {"last_run", CallJson(problem, measured->reports.back())}};
  Print(object);
  return kSuccess;
}

}  // namespace

void AddBench(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "bench",
      "Measure a service: verifies a first run, then medians, each beside its bound "
      "measured in the same run; exits 1 if the result is wrong");
  flags->server.AddTo(command);
  flags->shape.AddTo(command);
  flags->options.AddTo(command, TermForms::kFromFlags);
  command->add_flag("--backward", flags->backward,
                    "Measure the backward pass (out and lse are sent)");
  command->add_option("--runs", flags->runs, "Measured runs")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--rows", flags->rows, "Rows of each tensor that are verified")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "Of the inputs and of the rows")
      ->check(CLI::NonNegativeNumber.description(""))
      ->capture_default_str();
  command->add_option("--deadline", flags->deadline, "Of each call; none unless given");
  AddStreamsFlag(command, &flags->streams);
  AddTransportFlag(command, &flags->transport);
  command->add_option("--trace", flags->trace,
                      "Write the last run's timeline to this file, for chrome://tracing or "
                      "ui.perfetto.dev");
  command->add_flag("--json", flags->json, "Print one JSON object (docs/cli-json.md)");
  command->callback([flags, &run] { run = [flags] { return RunBench(*flags); }; });
}

}  // namespace ringattn::client::cli
