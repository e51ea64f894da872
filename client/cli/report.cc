#include "client/cli/report.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/proto_json.h"
#include "common/wire/durations.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

std::string Scaled(double value, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  int prefix = 0;
  while (value >= 1000 && prefix < 6) {
    value /= 1000;
    ++prefix;
  }
  return absl::StrFormat("%.*f %s%s", prefix == 0 ? 0 : 2, value, kPrefixes[prefix], unit);
}

double PerSecond(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

}  // namespace

std::string HumanBytes(double bytes) { return Scaled(bytes, "B"); }
std::string HumanRate(double per_second) { return Scaled(per_second, ""); }

Json ShapeJson(const Problem& problem) {
  const v1::AttentionShape& shape = problem.shape;
  Json json = {{"batch", shape.batch()},
               {"seq_len_q", shape.seq_len_q()},
               {"seq_len_kv", shape.seq_len_kv()},
               {"num_heads", shape.num_heads()},
               {"num_kv_heads", shape.num_kv_heads()},
               {"head_dim", shape.head_dim()},
               {"head_dim_v", shape.head_dim_v()},
               {"dtype", ShortName(problem.dtype)}};
  if (problem.output_dtype != v1::DATA_TYPE_UNSPECIFIED) {
    json["output_dtype"] = ShortName(problem.output_dtype);
  }
  if (shape.packing() != v1::PACKING_UNSPECIFIED) {
    json["packing"] = shape.packing() == v1::PACKING_QKV ? "qkv" : "kv";
  }
  if (problem.lse_format == v1::LSE_FORMAT_PER_DOCUMENT) json["lse"] = "per_document";
  if (shape.has_packed()) {
    json["cu_seqlens_q"] = Json(std::vector<uint64_t>(shape.packed().cu_seqlens_q().begin(),
                                                      shape.packed().cu_seqlens_q().end()));
    json["cu_seqlens_k"] = Json(std::vector<uint64_t>(shape.packed().cu_seqlens_k().begin(),
                                                      shape.packed().cu_seqlens_k().end()));
  }
  return json;
}

Json OptionsJson(const Problem& problem) {
  Json json = ProtoJson(problem.options, /*with_defaults=*/false);
  if (problem.has_dlse) json["dlse"] = true;
  if (problem.probability_rows.empty()) return json;
  Json& rows = json["probabilities"] = Json::array();
  for (const v1::ProbabilityRow& row : problem.probability_rows) {
    rows.push_back({{"batch", row.batch()}, {"position", row.position()}});
  }
  return json;
}

std::string OptionsText(const Problem& problem) {
  const Json options = OptionsJson(problem);
  std::vector<std::string> names;
  for (const auto& [name, value] : options.items()) names.push_back(name);
  return names.empty() ? "" : absl::StrCat("with   ", absl::StrJoin(names, ", "), "\n");
}

Json PlanJson(const v1::PlanReport& plan) {
  Json json = {
      {"schedule", ShortName(plan.schedule())},
      {"layout", ShortName(plan.layout())},
      {"world_size", plan.world_size()},
      {"stripe", plan.stripe()},
      {"members", Json(std::vector<std::string>(plan.members().begin(), plan.members().end()))},
      {"reason", plan.reason()},
      {"predicted_compute_seconds", ToSeconds(plan.predicted_compute_time())},
      {"exchanged_bytes", plan.exchanged_bytes()},
      {"ranks", Json::array()}};
  for (const v1::RankPlan& rank : plan.ranks()) {
    json["ranks"].push_back({{"rank", rank.rank()},
                             {"tokens_q", rank.tokens_q()},
                             {"tokens_kv", rank.tokens_kv()},
                             {"tiles", rank.tiles()},
                             {"sent_bytes", rank.sent_bytes()},
                             {"buffer_bytes", rank.buffer_bytes()},
                             {"workspace_bytes", rank.workspace_bytes()}});
  }
  return json;
}

namespace {

Json KernelsJson(const v1::RankReport& rank) {
  Json kernels = Json::array();
  for (const v1::KernelUse& use : rank.kernels()) {
    kernels.push_back({{"call", use.call()},
                       {"family", use.family()},
                       {"class", use.kernel_class()},
                       {"instructions", use.instructions()},
                       {"calls", use.calls()}});
  }
  return kernels;
}

// "ABORTED: worker-2 was lost"; empty if OK.
std::string FailureText(const absl::Status& failure) {
  if (failure.ok()) return "";
  return absl::StrCat(absl::StatusCodeToString(failure.code()), ": ", failure.message());
}

Json MeasuredJson(const CallReport& report) {
  const v1::Summary& summary = report.summary;
  uint64_t ring_bytes = 0;
  Json ranks = Json::array();
  for (const v1::RankReport& rank : summary.ranks()) {
    ring_bytes += rank.sent_bytes();
    ranks.push_back({{"rank", rank.rank()},
                     {"worker", rank.worker()},
                     {"compute_seconds", ToSeconds(rank.compute_time())},
                     {"ring_wait_seconds", ToSeconds(rank.ring_wait_time())},
                     {"sent_bytes", rank.sent_bytes()},
                     {"tiles", rank.tiles()},
                     {"kernels", KernelsJson(rank)}});
  }
  Json stages = Json::object();
  for (const v1::StageTime& stage : summary.stages()) {
    stages[ShortName(stage.stage())] = ToSeconds(stage.time());
  }
  return {{"request_id", report.accepted.request_id()},
          {"traceparent", report.accepted.traceparent()},
          {"generation", report.accepted.generation()},
          {"attempts", summary.attempts()},
          {"failed_attempts",
           {{"seconds", report.failed_seconds}, {"last", FailureText(report.last_failure)}}},
          {"plan", PlanJson(report.accepted.plan())},
          {"transport",
           {{"kind", ShortName(report.accepted.transport())},
            {"reason", report.transport_reason},
            {"staged_bytes", report.staged_bytes}}},
          {"bytes",
           {{ShortName(report.accepted.transport()),
             {{"up", summary.bytes_up()}, {"down", summary.bytes_down()}}},
            {"ring", {{"sent", ring_bytes}}}}},
          {"stage_seconds", stages},
          {"client_seconds",
           {{"accepted", report.times.accepted_seconds},
            {"uploaded", report.times.uploaded_seconds},
            {"first_output", report.times.first_output_seconds},
            {"finished", report.times.finished_seconds}}},
          {"compute_seconds", ToSeconds(summary.compute_time())},
          {"flops", summary.flops()},
          {"flops_per_second", PerSecond(summary.flops(), ToSeconds(summary.compute_time()))},
          {"ranks", ranks}};
}

}  // namespace

Json CallJson(const Problem& problem, const CallReport& report) {
  Json json = MeasuredJson(report);
  json["shape"] = ShapeJson(problem);
  json["options"] = OptionsJson(problem);
  json["residual"] = {{"handle", report.residual_handle()},
                      {"reason", report.residual_reason()},
                      {"failure", report.residual_failure}};
  return json;
}

std::string KernelsText(const v1::Summary& summary) {
  struct Used {
    std::string call, kernel;
    std::vector<std::string> workers;
  };
  std::vector<Used> all;
  std::vector<std::string> calls;  // in the order of their first use
  for (const v1::RankReport& rank : summary.ranks()) {
    for (const v1::KernelUse& use : rank.kernels()) {
      const std::string kernel =
          absl::StrCat(use.family(), "/", use.kernel_class(), use.instructions().empty() ? "" : " ",
                       use.instructions());
      if (std::count(calls.begin(), calls.end(), use.call()) == 0) calls.push_back(use.call());
      auto found = std::find_if(all.begin(), all.end(), [&](const Used& each) {
        return each.call == use.call() && each.kernel == kernel;
      });
      if (found == all.end()) found = all.insert(all.end(), {use.call(), kernel, {}});
      found->workers.push_back(rank.worker());
    }
  }
  std::vector<std::string> texts;
  for (const std::string& call : calls) {
    std::vector<Used> own;
    std::copy_if(all.begin(), all.end(), std::back_inserter(own),
                 [&call](const Used& each) { return each.call == call; });
    const bool mixed = own.size() > 1;  // then list the workers of each
    texts.push_back(absl::StrCat(
        call, " by ", absl::StrJoin(own, ", ", [mixed](std::string* text, const Used& each) {
          absl::StrAppend(text, each.kernel);
          if (mixed) absl::StrAppend(text, " (", absl::StrJoin(each.workers, ", "), ")");
        })));
  }
  return absl::StrJoin(texts, "; ");
}

std::string CallText(const CallReport& report) {
  const v1::PlanReport& plan = report.accepted.plan();
  const v1::Summary& summary = report.summary;
  std::string text = absl::StrFormat("plan   %s, %s, %d %s: %s\n", ShortName(plan.schedule()),
                                     ShortName(plan.layout()), plan.world_size(),
                                     plan.world_size() == 1 ? "member" : "members", plan.reason());
  absl::StrAppendFormat(&text, "time   %.3f s",
                        report.failed_seconds + report.times.finished_seconds);
  if (report.failed_seconds > 0) {
    absl::StrAppendFormat(&text, ", failed attempts %.3f", report.failed_seconds);
  }
  for (const v1::StageTime& stage : summary.stages()) {
    absl::StrAppendFormat(&text, ", %s %.3f", ShortName(stage.stage()), ToSeconds(stage.time()));
  }
  absl::StrAppendFormat(&text, "\nrate   %sFLOP/s (%sFLOP)",
                        HumanRate(PerSecond(summary.flops(), ToSeconds(summary.compute_time()))),
                        HumanRate(summary.flops()));
  if (const std::string kernels = KernelsText(summary); !kernels.empty()) {
    absl::StrAppend(&text, "\nran    ", kernels);
  }
  uint64_t ring_bytes = 0;
  for (const v1::RankReport& rank : summary.ranks()) ring_bytes += rank.sent_bytes();
  absl::StrAppendFormat(&text, "\nbytes  %s up, %s down, %s around the ring\n",
                        HumanBytes(summary.bytes_up()), HumanBytes(summary.bytes_down()),
                        HumanBytes(ring_bytes));
  if (!report.residual_handle().empty()) {
    absl::StrAppend(&text, "kept   --residual=", report.residual_handle(), "\n");
  } else if (!report.residual_reason().empty()) {
    absl::StrAppend(&text, "kept   nothing: ", report.residual_reason(), "\n");
  }
  if (!report.residual_failure.empty()) {
    absl::StrAppend(&text, "sent   the tensors, because the residual could not be read: ",
                    report.residual_failure, "\n");
  }
  absl::StrAppend(&text, "by     ", ShortName(report.accepted.transport()),
                  report.transport_reason.empty() ? "" : ": ", report.transport_reason, "\n");
  if (summary.attempts() > 1) {
    absl::StrAppend(&text, "sent   ", summary.attempts(), " times under request id ",
                    report.accepted.request_id(), "\n");
  }
  if (!report.last_failure.ok()) {
    absl::StrAppend(&text, "failed ", FailureText(report.last_failure), "\n");
  }
  return text;
}

std::string PredictionText(const v1::Accepted& accepted) {
  constexpr double kLongSeconds = 10;
  const double seconds = ToSeconds(accepted.plan().predicted_compute_time());
  if (seconds <= kLongSeconds) return "";
  return absl::StrFormat("ringattn: computing is predicted to take %.0f s\n", seconds);
}

}  // namespace ringattn::client::cli
