#include "server/core/testing/scenario_views.h"

#include <cstdlib>
#include <functional>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/core/loss/losses.h"

namespace ringattn::server {
namespace {

using View = std::function<ScenarioLines(const Coordinator&, const Args&, const ScenarioHistory&)>;

ScenarioLines State(const Coordinator& core, const Args& args, const ScenarioHistory&) {
  const std::optional<OperationView> view =
      core.FindOperation(args[1], Option(args, "principal", ""));
  std::string state = "unknown";
  if (view) {
    state = v1::RequestState_Name(view->state);
    state = std::string(absl::StripPrefix(state, "REQUEST_STATE_"));
    if (!view->members.empty()) {
      absl::StrAppend(&state, " on ", absl::StrJoin(view->members, " "));
    }
    if (view->failure) absl::StrAppend(&state, ": ", view->failure->reason);
  }
  return {{args[1], state}};
}

ScenarioLines Prediction(const Coordinator& core, const Args& args, const ScenarioHistory&) {
  const std::optional<OperationView> view = core.FindOperation(args[1], "");
  return {{args[1], view && view->plan ? absl::StrCat(view->plan->predicted_compute_seconds, " s")
                                       : "not planned"}};
}

ScenarioLines Reason(const Coordinator& core, const Args& args, const ScenarioHistory&) {
  const std::optional<OperationView> view = core.FindOperation(args[1], "");
  return {{args[1], view && view->plan ? view->plan->reason : "not planned"}};
}

// Newest first. Each must have been reported exactly once.
ScenarioLines Losses(const Coordinator& core, const Args&, const ScenarioHistory& history) {
  const CoordinatorSnapshot snapshot = core.Snapshot(/*max_requests=*/0);
  ScenarioLines lines;
  for (const LostWorker& loss : snapshot.losses) {
    lines.push_back({loss.worker, absl::StrCat(LossReasonName(loss.reason), ", ",
                                               loss.rank ? absl::StrCat("rank ", *loss.rank)
                                                         : std::string("no rank"),
                                               " of ", loss.generation, ", ended ",
                                               loss.ended_requests, ": ", loss.detail)});
  }
  if (history.losses != snapshot.losses.size()) {
    lines.push_back({"", absl::StrCat("reported ", history.losses)});
  }
  return lines;
}

// The requests in the snapshot for operators, at most args[1].
ScenarioLines Requests(const Coordinator& core, const Args& args, const ScenarioHistory&) {
  const CoordinatorSnapshot snapshot = core.Snapshot(std::atoll(args[1].c_str()));
  Args counts;
  for (size_t stage = 0; stage < kRequestStages; ++stage) {
    const int64_t count = snapshot.requests_by_stage[stage];
    if (count == 0) continue;
    counts.push_back(absl::StrCat(count, " ", RequestStageName(static_cast<RequestStage>(stage))));
  }
  ScenarioLines lines = {{"", counts.empty() ? "no requests" : absl::StrJoin(counts, ", ")}};
  for (const RequestSnapshot& row : snapshot.requests) {
    lines.push_back(
        {row.request_id,
         absl::StrCat(RequestStageName(row.stage), ", ", row.query_tokens, " tokens, ",
                      absl::FormatDuration(snapshot.when - row.arrived_at),
                      row.members.empty() ? "" : " on ", absl::StrJoin(row.members, " "))});
  }
  return lines;
}

// One line per worker: its state and rank.
ScenarioLines Workers(const Coordinator& core, const Args&, const ScenarioHistory&) {
  ScenarioLines lines;
  const v1::Topology topology = core.topology();
  for (const v1::WorkerInfo& worker : topology.workers()) {
    std::string text = v1::WorkerState_Name(worker.state());
    text = std::string(absl::StripPrefix(text, "WORKER_STATE_"));
    if (worker.has_rank()) absl::StrAppend(&text, ", rank ", worker.rank());
    if (worker.parted_from_size() > 0) {
      absl::StrAppend(&text, ", parted from ", absl::StrJoin(worker.parted_from(), " "));
    }
    lines.push_back({worker.name(), text});
  }
  lines.push_back({"", absl::StrCat(core.stats().parted_workers, " parted")});
  return lines;
}

ScenarioLines Stats(const Coordinator& core, const Args&, const ScenarioHistory&) {
  const CoordinatorStats stats = core.stats();
  return {{"", absl::StrCat("queued ", stats.queued_requests, " active ", stats.active_requests,
                            stats.reserved_bytes > 0 ? " memory held" : " memory free", " ready ",
                            stats.ready_workers)}};
}

ScenarioLines OrderSteps(const Coordinator& core, const Args&, const ScenarioHistory&) {
  return {{"", absl::StrCat(core.stats().order_steps)}};
}

ScenarioLines ResidualsKept(const Coordinator& core, const Args&, const ScenarioHistory&) {
  const ResidualCounts counts = core.stats().residuals;
  std::string text = absl::StrCat(counts.residuals, " of ", counts.bytes, " bytes, kept ",
                                  counts.kept, " refused ", counts.refused, " read ", counts.reads);
  for (const ResidualEnd end : kResidualEnds) {
    const int64_t ended = counts.ended[static_cast<size_t>(end)];
    if (ended > 0) absl::StrAppend(&text, " ", ResidualEndName(end), " ", ended);
  }
  return {{"", text}};
}

// Reserved memory by the topology that was published last, which must be the newest.
ScenarioLines Memory(const Coordinator& core, const Args&, const ScenarioHistory& history) {
  const v1::Topology topology = core.topology();
  Args workers;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    workers.push_back(absl::StrCat(worker.name(), " ", worker.reserved_bytes()));
  }
  const bool published = history.published.SerializeAsString() == topology.SerializeAsString();
  return {{"", absl::StrCat(published ? "" : "unpublished: ", absl::StrJoin(workers, ", "))}};
}

const std::map<std::string, View>& Views() {
  static const auto* views = new std::map<std::string, View>{
      {"state", State},     {"predicted", Prediction}, {"reason", Reason},
      {"losses", Losses},   {"requests", Requests},    {"stats", Stats},
      {"workers", Workers}, {"memory", Memory},        {"residuals", ResidualsKept},
      {"steps", OrderSteps}};
  return *views;
}

}  // namespace

bool IsQuery(const std::string& verb) { return Views().count(verb) > 0; }

ScenarioLines RunQuery(const Coordinator& core, const Args& args, const ScenarioHistory& history) {
  return Views().at(args[0])(core, args, history);
}

}  // namespace ringattn::server
