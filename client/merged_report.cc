#include "client/merged_report.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"

namespace ringattn::client {
namespace {

void AddTo(const google::protobuf::Duration& more, google::protobuf::Duration* sum) {
  SetDuration(ToDuration(*sum) + ToDuration(more), sum);
}

struct Interval {
  double begin = std::numeric_limits<double>::infinity();
  double end = -std::numeric_limits<double>::infinity();

  void Add(double from, double to) {
    begin = std::min(begin, from);
    end = std::max(end, to);
  }
  double length() const { return std::max(0.0, end - begin); }
};

// Seconds from `since` to when the part's attempt began.
double BeganAfter(std::chrono::steady_clock::time_point since, const CallReport& part) {
  return std::chrono::duration<double>(part.times.began - since).count();
}

ClientTimes MergeTimes(const std::vector<CallReport>& parts) {
  ClientTimes merged = parts[0].times;
  for (const CallReport& part : parts) merged.began = std::min(merged.began, part.times.began);
  Interval accepted, uploaded, output, finished;
  for (const CallReport& part : parts) {
    const double began = BeganAfter(merged.began, part);
    const auto add = [&](Interval& interval, double seconds) {
      interval.Add(began + seconds, began + seconds);
    };
    add(accepted, part.times.accepted_seconds);
    add(uploaded, part.times.uploaded_seconds);
    if (part.times.first_output_seconds > 0) add(output, part.times.first_output_seconds);
    add(finished, part.times.finished_seconds);
  }
  merged.accepted_seconds = accepted.begin;
  merged.uploaded_seconds = uploaded.end;
  merged.first_output_seconds = output.end >= output.begin ? output.begin : 0;
  merged.finished_seconds = finished.end;
  return merged;
}

// What `get` gives for all of them, else `otherwise`.
template <typename Get, typename Value>
Value Common(const std::vector<CallReport>& parts, const Get& get, Value otherwise) {
  const Value first = get(parts[0].accepted.plan());
  for (const CallReport& part : parts) {
    if (get(part.accepted.plan()) != first) return otherwise;
  }
  return first;
}

void AddRankPlan(const v1::RankPlan& rank, v1::PlanReport* merged) {
  auto* ranks = merged->mutable_ranks();
  auto found = std::find_if(ranks->begin(), ranks->end(),
                            [&](const v1::RankPlan& r) { return r.rank() == rank.rank(); });
  if (found == ranks->end()) {
    *merged->add_ranks() = rank;
    return;
  }
  found->set_tokens_q(found->tokens_q() + rank.tokens_q());
  found->set_tokens_kv(found->tokens_kv() + rank.tokens_kv());
  found->set_tiles(found->tiles() + rank.tiles());
  found->set_sent_bytes(found->sent_bytes() + rank.sent_bytes());
  found->set_buffer_bytes(found->buffer_bytes() + rank.buffer_bytes());
}

v1::PlanReport MergePlans(const std::vector<CallReport>& parts) {
  using Plan = v1::PlanReport;
  Plan merged;
  merged.set_schedule(Common(
      parts, [](const Plan& p) { return p.schedule(); }, v1::SCHEDULE_UNSPECIFIED));
  merged.set_layout(Common(
      parts, [](const Plan& p) { return p.layout(); }, v1::LAYOUT_UNSPECIFIED));
  merged.set_world_size(Common(
      parts, [](const Plan& p) { return p.world_size(); }, 0u));
  merged.set_stripe(Common(
      parts, [](const Plan& p) { return p.stripe(); }, uint64_t{0}));
  merged.set_reason(
      absl::StrCat(parts.size(), " requests; the first: ", parts[0].accepted.plan().reason()));
  for (const CallReport& part : parts) {
    const Plan& plan = part.accepted.plan();
    for (const std::string& member : plan.members()) {
      const auto& members = merged.members();
      if (std::find(members.begin(), members.end(), member) == members.end()) {
        merged.add_members(member);
      }
    }
    AddTo(plan.predicted_compute_time(), merged.mutable_predicted_compute_time());
    merged.set_exchanged_bytes(merged.exchanged_bytes() + plan.exchanged_bytes());
    for (const v1::RankPlan& rank : plan.ranks()) AddRankPlan(rank, &merged);
  }
  return merged;
}

v1::Accepted MergeAccepted(const std::string& request_id, const std::vector<CallReport>& parts) {
  v1::Accepted merged;
  merged.set_request_id(request_id);
  merged.set_traceparent(parts[0].accepted.traceparent());
  merged.set_transport(parts[0].accepted.transport());
  merged.set_transport_reason(parts[0].accepted.transport_reason());
  merged.set_max_chunk_bytes_up(parts[0].accepted.max_chunk_bytes_up());
  merged.set_max_chunk_bytes_down(parts[0].accepted.max_chunk_bytes_down());
  merged.set_recommended_chunk_bytes(parts[0].accepted.recommended_chunk_bytes());
  for (const CallReport& part : parts) {
    merged.set_generation(std::max(merged.generation(), part.accepted.generation()));
  }
  *merged.mutable_plan() = MergePlans(parts);
  return merged;
}

// Stages follow one another from the queue's end on, which is Accepted.
class StageMerger {
 public:
  void Add(double accepted, const v1::Summary& summary) {
    double at = accepted;
    for (const v1::StageTime& stage : summary.stages()) {
      const double seconds = ToSeconds(stage.time());
      if (stage.stage() == v1::STAGE_QUEUE) {
        Of(v1::STAGE_QUEUE).Add(accepted - seconds, accepted);
        continue;
      }
      Of(stage.stage()).Add(at, at + seconds);
      if (stage.stage() == v1::STAGE_COMPUTE) {
        compute_.Add(at, at + ToSeconds(summary.compute_time()));
      }
      at += seconds;
    }
  }

  void Fill(v1::Summary* merged) const {
    for (const auto& [name, interval] : stages_) {
      v1::StageTime* stage = merged->add_stages();
      stage->set_stage(name);
      SetSeconds(interval.length(), stage->mutable_time());
    }
    SetSeconds(compute_.length(), merged->mutable_compute_time());
  }

 private:
  Interval& Of(v1::Stage name) {
    for (auto& [known, interval] : stages_) {
      if (known == name) return interval;
    }
    return stages_.emplace_back(name, Interval()).second;
  }

  std::vector<std::pair<v1::Stage, Interval>> stages_;
  Interval compute_;
};

void AddKernel(const v1::KernelUse& use, v1::RankReport* rank) {
  const auto same = [&use](const v1::KernelUse& other) {
    return other.call() == use.call() && other.family() == use.family() &&
           other.kernel_class() == use.kernel_class() && other.instructions() == use.instructions();
  };
  auto* kernels = rank->mutable_kernels();
  const auto found = std::find_if(kernels->begin(), kernels->end(), same);
  if (found == kernels->end()) {
    *rank->add_kernels() = use;
  } else {
    found->set_calls(found->calls() + use.calls());
  }
}

void AddRank(const v1::RankReport& rank, double shift_seconds, v1::Summary* merged) {
  auto* ranks = merged->mutable_ranks();
  auto found = std::find_if(ranks->begin(), ranks->end(),
                            [&](const v1::RankReport& r) { return r.worker() == rank.worker(); });
  if (found == ranks->end()) {
    v1::RankReport* added = merged->add_ranks();
    added->set_rank(rank.rank());
    added->set_worker(rank.worker());
    found = ranks->end() - 1;
  }
  AddTo(rank.compute_time(), found->mutable_compute_time());
  AddTo(rank.ring_wait_time(), found->mutable_ring_wait_time());
  found->set_sent_bytes(found->sent_bytes() + rank.sent_bytes());
  found->set_tiles(found->tiles() + rank.tiles());
  for (const v1::KernelUse& use : rank.kernels()) AddKernel(use, &*found);
  for (const v1::TimelineEvent& event : rank.timeline()) {
    v1::TimelineEvent* shifted = found->add_timeline();
    *shifted = event;
    SetSeconds(ToSeconds(event.begin()) + shift_seconds, shifted->mutable_begin());
    SetSeconds(ToSeconds(event.end()) + shift_seconds, shifted->mutable_end());
  }
}

v1::Summary MergeSummaries(const ClientTimes& times, const std::vector<CallReport>& parts) {
  v1::Summary merged;
  StageMerger stages;
  uint32_t replays = 0;
  for (const CallReport& part : parts) {
    const v1::Summary& summary = part.summary;
    const double accepted = BeganAfter(times.began, part) + part.times.accepted_seconds;
    stages.Add(accepted, summary);
    for (const v1::RankReport& rank : summary.ranks()) {
      AddRank(rank, accepted - times.accepted_seconds, &merged);
    }
    merged.set_flops(merged.flops() + summary.flops());
    merged.set_bytes_up(merged.bytes_up() + summary.bytes_up());
    merged.set_bytes_down(merged.bytes_down() + summary.bytes_down());
    replays += summary.attempts() - 1;
  }
  merged.set_attempts(1 + replays);
  stages.Fill(&merged);
  return merged;
}

}  // namespace

CallReport MergeReports(const std::string& request_id, std::vector<CallReport> parts) {
  CallReport merged;
  merged.times = MergeTimes(parts);
  merged.accepted = MergeAccepted(request_id, parts);
  merged.transport_reason = parts[0].transport_reason;
  merged.summary = MergeSummaries(merged.times, parts);
  merged.parts = std::move(parts);
  return merged;
}

}  // namespace ringattn::client
