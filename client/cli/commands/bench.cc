#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/api/client.h"
#include "client/cli/bench/bench_load.h"
#include "client/cli/bench/bench_problem.h"
#include "client/cli/bench/bench_steps.h"
#include "client/cli/bench/loopback_rate.h"
#include "client/cli/bench/payload_bound.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/progress_bar.h"
#include "client/cli/region_stage.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "client/cli/trace.h"
#include "client/cli/verify_json.h"
#include "common/base/counted.h"
#include "common/oracle/verify.h"
#include "common/wire/durations.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

struct BenchFlags {
  ServerFlags server;
  ShapeFlags shape;
  OptionFlags options;
  bool backward = false;
  int runs = 5;
  int64_t rows = 32;
  uint64_t seed = 1;
  std::string deadline;
  std::string transport = "auto";
  CudaFlags cuda;
  int channels_per_worker = ClientOptions().channels_per_worker;
  int64_t staging_bytes = ClientOptions().staging_bytes;
  std::string trace;
  LoadFlags load;
  StepFlags steps;
  bool json = false;
};

// A measured value and its upper bound.
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
  PayloadBound payload_bound;  // of the last run's transport
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

// Returns the parts of the upload, compute and download stages together, if the worker answered
// Reserve with the result.
Json InlineSeconds(const std::vector<CallReport>& reports) {
  const auto rank_of = [](const CallReport& report) -> const v1::RankReport& {
    static const auto* const none = new v1::RankReport();
    return report.summary.ranks_size() == 1 ? report.summary.ranks(0) : *none;
  };
  for (const CallReport& report : reports) {
    if (!rank_of(report).has_service_time()) return nullptr;
  }
  const auto copies = [&](const CallReport& report) {
    const v1::RankReport& rank = rank_of(report);
    return ToSeconds(rank.copy_in_time()) + ToSeconds(rank.copy_out_time());
  };
  const auto kernels = [&](const CallReport& report) {
    return ToSeconds(rank_of(report).compute_time());
  };
  const auto service = [&](const CallReport& report) {
    return ToSeconds(rank_of(report).service_time());
  };
  const auto stages = [](const CallReport& report) {
    return StageSeconds(report, v1::STAGE_UPLOAD) + StageSeconds(report, v1::STAGE_COMPUTE) +
           StageSeconds(report, v1::STAGE_DOWNLOAD);
  };
  return {{"kernels", MedianOf(reports, kernels)},
          {"copies", MedianOf(reports, copies)},
          {"worker", MedianOf(reports,
                              [&](const CallReport& report) {
                                return service(report) - kernels(report) - copies(report);
                              })},
          {"messages", MedianOf(reports, [&](const CallReport& report) {
             return stages(report) - service(report);
           })}};
}

// A connected client, the request to measure, and its first result.
struct Bench {
  std::unique_ptr<Client> client;
  std::unique_ptr<BenchProblem> problem;
  std::unique_ptr<BenchCaller> caller;
  CallOptions options;
  oracle::Report verdict;
  CallReport first;
};

CallResult CallOnce(Bench& bench) {
  return bench.caller->Call(bench.options, bench.caller->results());
}

// Connects, makes a first call and verifies its result.
absl::StatusOr<Bench> Begin(const BenchFlags& flags, const Problem& problem,
                            const AttentionSpec& spec, int channels, ProgressBar& bar) {
  const auto deadline = ParseDeadline(flags.deadline);
  if (!deadline.ok()) return deadline.status();
  Bench bench;
  ClientOptions options;
  options.channels = channels;
  options.channels_per_worker = flags.channels_per_worker;
  options.staging_bytes = flags.staging_bytes;
  auto client = flags.server.Connect(options);
  if (!client.ok()) return client.status();
  bench.client = *std::move(client);
  bench.options = {.deadline = *deadline};
  bar.Update("making inputs", -1);
  bench.problem = std::make_unique<BenchProblem>(problem, spec, flags.backward, flags.seed);
  bench.caller = std::make_unique<BenchCaller>(bench.client.get(), bench.problem.get(), flags.cuda);
  SetTransport(flags.transport, &bench.options);
  bar.Update("first run", -1);
  CallResult report = bench.caller->CallForward(bench.options);
  if (report.ok() && flags.backward) report = CallOnce(bench);
  if (!report.ok()) return report.status();
  if (absl::Status status = bench.caller->Fetch(); !status.ok()) return status;
  bench.first = *std::move(report);
  bar.Update("verifying", -1);
  bench.verdict = bench.problem->Judge(bench.caller->results(), flags.rows, flags.seed);
  return bench;
}

// The rate of plain TCP with as many connections as the payload uses. The probe is long enough to
// outlast slow start, and bounded.
absl::StatusOr<double> MeasureLoopback(const CallReport& report, int connections) {
  const int64_t probe = std::clamp<int64_t>(report.summary.bytes_up(), 256 << 20, 1 << 30);
  return LoopbackBytesPerSecond(probe, connections);
}

PayloadBound RelayBound(double loopback_bytes_per_second, size_t connections) {
  return {.kind = PayloadBound::Kind::kTcp,
          .side_by_side = static_cast<int>(connections),
          .bytes_per_second = loopback_bytes_per_second};
}

absl::StatusOr<Measured> Measure(const BenchFlags& flags, const Problem& problem,
                                 const AttentionSpec& spec) {
  auto trace = TraceFile::Open(flags.trace);
  if (!trace.ok()) return trace.status();
  ProgressBar bar;
  auto bench = Begin(flags, problem, spec, /*channels=*/1, bar);
  if (!bench.ok()) return bench.status();
  Measured measured;
  measured.verdict = bench->verdict;
  if (!measured.verdict.passed()) return measured;
  for (int run = 0; run < flags.runs; ++run) {
    bar.Update("measuring", static_cast<double>(run) / flags.runs);
    bench->options.with_timeline = !flags.trace.empty() && run == flags.runs - 1;
    CallResult report = CallOnce(*bench);
    if (!report.ok()) return report.status();
    measured.reports.push_back(*std::move(report));
  }
  const CallReport& last = measured.reports.back();
  const auto loopback = MeasureLoopback(last, /*connections=*/1);
  if (!loopback.ok()) return loopback.status();
  measured.loopback_bytes_per_second = *loopback;
  PayloadBounds bounds(flags.channels_per_worker, RelayBound(*loopback, /*connections=*/1));
  const auto payload_bound = bounds.Of(last);
  if (!payload_bound.ok()) return payload_bound.status();
  measured.payload_bound = *payload_bound;
  if (absl::Status status = trace->Write(last); !status.ok()) return status;
  return measured;
}

struct Figures {
  double seconds_median = 0, seconds_min = 0, seconds_max = 0;
  Json stage_seconds;   // medians, each computed separately
  Json inline_seconds;  // the same for the parts of stages; null unless one message each way
                        // sufficed
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

  for (const v1::Stage stage :
       {v1::STAGE_QUEUE, v1::STAGE_UPLOAD, v1::STAGE_COMPUTE, v1::STAGE_DOWNLOAD}) {
    figures.stage_seconds[ShortName(stage)] =
        MedianOf(reports, [stage](const CallReport& r) { return StageSeconds(r, stage); });
  }
  // Time outside the stages: the trip to the coordinator and back, and work at each end.
  figures.stage_seconds["elsewhere"] = MedianOf(reports, [](const CallReport& r) {
    double elsewhere = r.times.finished_seconds;
    for (const v1::StageTime& stage : r.summary.stages()) elsewhere -= ToSeconds(stage.time());
    return elsewhere;
  });

  figures.inline_seconds = InlineSeconds(reports);
  // The kernel time of the busiest rank, which is the compute time without any wait.
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
  const double wire = measured.payload_bound.bytes_per_second;
  figures.upload = {
      ratio(
          last.bytes_up(),
          MedianOf(reports, [](const CallReport& r) { return StageSeconds(r, v1::STAGE_UPLOAD); })),
      wire};
  // Both directions, over all time that is neither queue nor compute. The coordinator's download
  // stage ends when it has written the last byte, not when the client has received it.
  const double wire_seconds = MedianOf(reports, [](const CallReport& r) {
    return r.times.finished_seconds - StageSeconds(r, v1::STAGE_QUEUE) -
           ToSeconds(r.summary.compute_time());
  });
  figures.payload = {ratio(last.bytes_up() + last.bytes_down(), wire_seconds), wire};
  const double tokens =
      static_cast<double>(problem.shape.batch()) * static_cast<double>(problem.shape.seq_len_q());
  // An unknown payload rate counts as free, which still gives an upper bound.
  const double up_seconds = ratio(static_cast<double>(last.bytes_up()), wire);
  const double down_seconds = ratio(static_cast<double>(last.bytes_down()), wire);
  const double bound_seconds = kernel_seconds + up_seconds + down_seconds;
  figures.tokens_per_second = {ratio(tokens, figures.seconds_median), ratio(tokens, bound_seconds)};
  return figures;
}

void PrintFigure(const char* name, const Figure& figure, double unit, const char* unit_name,
                 const std::string& bound) {
  if (figure.bound <= 0) {
    std::printf("%-10s %12.4g %-8s %12s  %6s  %s\n", name, figure.value / unit, unit_name, "-", "-",
                bound.c_str());
    return;
  }
  std::printf("%-10s %12.4g %-8s %12.4g  %5.1f%%  %s\n", name, figure.value / unit, unit_name,
              figure.bound / unit, 100 * figure.value / figure.bound, bound.c_str());
}

void PrintText(const BenchFlags& flags, const Measured& measured, const Figures& figures) {
  const v1::PlanReport& plan = measured.reports.back().accepted.plan();
  std::printf("%s\n%s, %s, %s: %s\n", measured.verdict.ToString().c_str(),
              ShortName(plan.schedule()).c_str(), ShortName(plan.layout()).c_str(),
              Counted(plan.world_size(), "member").c_str(), plan.reason().c_str());
  std::printf("%s, %d runs after the verified one: median %.4f s (%.4f to %.4f)\n\n",
              flags.backward ? "backward" : "forward", flags.runs, figures.seconds_median,
              figures.seconds_min, figures.seconds_max);
  if (const std::string kernels = KernelsText(measured.reports.back().summary); !kernels.empty()) {
    std::printf("%s\n", kernels.c_str());
  }
  const v1::Transport way = measured.reports.back().accepted.transport();
  std::printf("by %s: %s\n", ShortName(way).c_str(),
              measured.reports.back().transport_reason.c_str());
  const std::string payload_bound = measured.payload_bound.Text();
  std::printf("%-10s %12s %-8s %12s  %6s  %s\n", "", "measured", "", "bound", "", "the bound is");
  PrintFigure("call", figures.tokens_per_second, 1, "tokens/s",
              "kernel time of the busiest rank + payload at its bound");
  PrintFigure("compute", figures.flops_per_second, 1e9, "GFLOP/s",
              "the busiest rank's kernels without any wait");
  PrintFigure("upload", figures.upload, 1e9, "GB/s", payload_bound);
  PrintFigure("payload", figures.payload, 1e9, "GB/s",
              "the same (both directions, over all time except queue and compute)");
}

int Mismatch(const oracle::Report& verdict, bool json) {
  if (json) {
    Print({{"command", "bench"}, {"verified", ReportJson(verdict)}});
  } else {
    std::printf("%sMISMATCH: nothing was measured\n", verdict.ToString().c_str());
  }
  return kMismatch;
}

// Maximum connections of a load test. One does not saturate a link, and more than this are no
// faster.
constexpr int kMaxChannels = 16;

int RunLoadTest(const BenchFlags& flags, const Problem& problem, const AttentionSpec& spec) {
  if (!flags.trace.empty()) {
    return Fail(UsageError("--trace cannot be combined with a load test"), flags.json);
  }
  auto test = LoadTest::Prepare(flags.load);
  if (!test.ok()) return Fail(test.status(), flags.json);
  const int channels = std::clamp(test->most_in_flight(), 1, kMaxChannels);
  Json object = {{"command", "bench"}, {"direction", flags.backward ? "backward" : "forward"}};
  {
    ProgressBar bar;
    auto bench = Begin(flags, problem, spec, channels, bar);
    if (!bench.ok()) return Fail(bench.status(), flags.json);
    if (!bench->verdict.passed()) return Mismatch(bench->verdict, flags.json);
    const auto loopback = MeasureLoopback(bench->first, channels);
    if (!loopback.ok()) return Fail(loopback.status(), flags.json);
    object["verified"] = ReportJson(bench->verdict);
    object["loopback_bytes_per_second"] = *loopback;
    PayloadBounds bounds(flags.channels_per_worker, RelayBound(*loopback, channels));
    const absl::Status status =
        test->Run(*bench->client, flags.server.server, *bench->problem, bench->options,
                  bench->caller->results(), bounds, flags.rows, flags.cuda, bar);
    if (absl::IsDataLoss(status)) {
      Fail(status, flags.json);
      return kMismatch;
    }
    if (!status.ok()) return Fail(status, flags.json);
  }
  object["load"] = test->ToJson();
  if (absl::Status status = test->Export(object); !status.ok()) return Fail(status, flags.json);
  if (flags.json) {
    Print(object);
  } else {
    std::printf("%s", test->Text().c_str());
  }
  return test->HasDeadLevel() ? kFailure : kSuccess;
}

int RunSteps(const BenchFlags& flags, const Problem& problem) {
  if (flags.backward || !flags.trace.empty() || flags.load.wanted()) {
    return Fail(UsageError("--steps cannot be combined with --backward, --trace or a load test"),
                flags.json);
  }
  const auto deadline = ParseDeadline(flags.deadline);
  if (!deadline.ok()) return Fail(deadline.status(), flags.json);
  auto client = flags.server.Connect({.channels = 1});
  if (!client.ok()) return Fail(client.status(), flags.json);
  absl::StatusOr<std::vector<StepLevel>> levels;
  {
    ProgressBar bar;
    levels = MeasureSteps(client->get(), problem, flags.steps, flags.transport, *deadline,
                          flags.rows, flags.seed, bar);
  }
  if (!levels.ok()) return Fail(levels.status(), flags.json);
  Json object = {{"command", "bench"}, {"direction", "steps"}, {"layers", flags.steps.layers}};
  object["levels"] = Json::array();
  for (const StepLevel& level : *levels) {
    object["levels"].push_back(level.ToJson(flags.steps.layers));
  }
  const StepLevel& last = levels->back();
  if (flags.json) {
    Print(object);
  } else {
    std::printf("%u layers on %d workers (%u head parts, %u position parts) by %s: %s\n",
                flags.steps.layers, last.placement.members_size(), last.placement.head_parts(),
                last.placement.position_parts(), ShortName(last.transport).c_str(),
                last.transport_reason.c_str());
    std::printf(
        "times in us; overhead is call - device; the bound is device + an empty message's "
        "round trip, by layer\n%s",
        StepTableHead().c_str());
    for (const StepLevel& level : *levels) {
      if (level.passed()) std::printf("%s", level.Text(flags.steps.layers).c_str());
    }
    if (!last.passed()) {
      std::printf("MISMATCH at batch %lld, length %lld: error %g exceeds %g\n",
                  static_cast<long long>(last.batch), static_cast<long long>(last.length),
                  last.error, last.error_bound);
    }
  }
  return last.passed() ? kSuccess : kMismatch;
}

int RunBench(const BenchFlags& flags) {
  Problem problem;
  if (absl::Status status = flags.shape.Apply(&problem); !status.ok()) {
    return Fail(status, flags.json);
  }
  if (absl::Status status = flags.options.Apply(&problem); !status.ok()) {
    return Fail(status, flags.json);
  }
  if (flags.steps.steps > 0) return RunSteps(flags, problem);
  const auto valid = ValidateLocally(
      problem, flags.backward ? Direction::kBackward : Direction::kForward, flags.backward);
  if (!valid.ok()) return Fail(valid.status(), flags.json);
  if (flags.load.wanted()) return RunLoadTest(flags, problem, valid->spec);
  if (flags.load.collects_metrics()) {
    return Fail(UsageError("--collect_metrics needs --concurrency_range or --request_rate_range"),
                flags.json);
  }
  const auto measured = Measure(flags, problem, valid->spec);
  if (!measured.ok()) return Fail(measured.status(), flags.json);
  if (!measured->verdict.passed()) return Mismatch(measured->verdict, flags.json);
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
                 {"stage_seconds", figures.stage_seconds},
                 {"inline_seconds", figures.inline_seconds},
                 {"tokens_per_second", figures.tokens_per_second.ToJson()},
                 {"compute_flops_per_second", figures.flops_per_second.ToJson()},
                 {"upload_bytes_per_second", figures.upload.ToJson()},
                 {"payload_bytes_per_second", figures.payload.ToJson()},
                 {"payload_bound", measured->payload_bound.ToJson()},
                 {"loopback_bytes_per_second", measured->loopback_bytes_per_second},
                 {"last_run", CallJson(problem, measured->reports.back())}};
  Print(object);
  return kSuccess;
}

}  // namespace

void AddBench(FlagSet& program, Run& run) {
  auto flags = std::make_shared<BenchFlags>();
  FlagSet& command = program.AddCommand(
      "bench",
      "Measure a service: verify a first call, then report medians, each with an upper bound "
      "measured in the same run; exits 1 if the result is wrong");
  flags->server.AddTo(command);
  flags->shape.AddTo(command);
  flags->options.AddTo(command, TermForms::kFromFlags);
  command.Add("--backward", &flags->backward, "Measure the backward pass (out and lse are sent)");
  command.Add("--runs", &flags->runs, "Measured runs").InRange(1, 10000).ShowDefault();
  command.Add("--rows", &flags->rows, "Rows of each tensor that are verified")
      .Positive()
      .ShowDefault();
  command.Add("--seed", &flags->seed, "Seed of the inputs and of the row selection")
      .NotNegative()
      .ShowDefault();
  command.Add("--deadline", &flags->deadline, "Limit of each call; default: none");
  AddTransportFlags(command, &flags->transport, &flags->staging_bytes);
  AddCudaFlags(command, &flags->cuda);
  AddChannelsFlag(command, &flags->channels_per_worker);
  command.Add("--trace", &flags->trace,
              "Write the last run's timeline to this file, for chrome://tracing or "
              "ui.perfetto.dev");
  flags->load.AddTo(command);
  flags->steps.AddTo(command);
  command.Add("--json", &flags->json, "Print one JSON object (docs/cli-json.md)");
  command.OnChosen([flags, &run] { run = [flags] { return RunBench(*flags); }; });
}

}  // namespace ringattn::client::cli
