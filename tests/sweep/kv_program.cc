#include "tests/sweep/kv_program.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/kv/shard_cut.h"

namespace ringattn::tests {

std::string KvProgram::Run() {
  MakeSpec();
  MakeRanks();
  if (!failure_.empty()) return absl::StrCat(failure_, "\n", Describe());
  const int64_t steps = 3 + Pick(4);
  const int64_t cut = mode_ == Mode::kCut ? Pick(steps) : -1;
  for (int64_t i = 0; i < steps && failure_.empty(); ++i) {
    OneStep(i == cut);
    if (!failure_.empty()) {
      failure_ = absl::StrCat("step ", i, " of ", steps, ": ", failure_, "\n", Describe());
    }
  }
  return failure_;
}

void KvProgram::MakeRanks() {
  for (int rank = 0; rank < placement_.world_size(); ++rank) {
    auto shard = KvShard::Make(spec_, placement_, rank, device_);
    if (!Check(shard.status(), "make")) return;
    shards_.push_back(*std::move(shard));
    if (!shards_.back()->Zero(never_)) failure_ = "memory was not zeroed";
  }
  Settle(0);
}

std::string KvProgram::Describe() const {
  return absl::StrCat(ToProto(spec_).ShortDebugString().substr(0, 900), " parts ",
                      placement_.head_parts, " x ", placement_.position_parts);
}

bool KvProgram::Check(const absl::Status& status, absl::string_view what) {
  if (status.ok()) return true;
  failure_ = absl::StrCat(what, ": ", status.ToString());
  return false;
}

bool KvProgram::SendBegin(int rank, const KvStep& step, v1::StepResponse* response) {
  for (int i = 0; i < (mode_ == Mode::kTwice ? 2 : 1); ++i) {
    response->Clear();
    if (!Check(shards_[rank]->Begin(epoch_, ToProto(step), response), "begin")) return false;
  }
  return true;
}

bool KvProgram::SendCall(int rank, const KvStep& step, const v1::LayerCall& call,
                         v1::LayerResult* result) {
  const v1::LayerCall cut = CutCall(spec_, placement_, step, call, rank);
  for (int i = 0; i < (mode_ == Mode::kTwice ? 2 : 1); ++i) {
    result->Clear();
    if (!Check(shards_[rank]->Call(epoch_, cut, kernels_.get(), never_, result), "call")) {
      return false;
    }
  }
  return true;
}

void KvProgram::OneStep(bool cut) {
  KvStep step = MakeStep();
  recent_.push_back(step);
  if (recent_.size() > 2) recent_.erase(recent_.begin());
  const int ranks = placement_.world_size();
  std::vector<v1::LayerCall> calls = MakeCalls(step);
  // Messages that each rank still gets: Begin, then calls.
  std::vector<size_t> budget(ranks, calls.size() + 1);
  if (cut && !Chance(4)) {
    for (size_t& messages : budget) messages = Pick(static_cast<int64_t>(calls.size()) + 2);
  }
  std::vector<v1::StepResponse> begun(ranks);
  bool refused = false, accepted = false;
  for (int rank = 0; rank < ranks; ++rank) {
    if (budget[rank] == 0) continue;
    if (!SendBegin(rank, step, &begun[rank])) return;
    (begun[rank].has_refused() ? refused : accepted) = true;
  }
  if (refused && accepted) {
    failure_ = "some ranks refuse the step and others do not";
    return;
  }
  if (refused) {
    if (!CheckRefusals(begun)) return;
    // The step before is committed; so is nothing of this one.
    if (cut) CutAndSettle();
    if (failure_.empty()) MakeRoom();
    return;
  }
  uint32_t crc = 0;
  bool first = true;
  for (int rank = 0; rank < ranks; ++rank) {
    if (budget[rank] == 0) continue;
    if (!first && begun[rank].accepted().tables_crc32c() != crc) {
      failure_ = "the tables of two ranks differ";
      return;
    }
    crc = begun[rank].accepted().tables_crc32c();
    first = false;
  }
  Model after = Commands(step);
  for (size_t c = 0; c < calls.size(); ++c) {
    std::vector<v1::LayerResult> results(ranks);
    bool all = true;
    for (int rank = 0; rank < ranks; ++rank) {
      if (budget[rank] <= c + 1) {
        all = false;
        continue;
      }
      if (!SendCall(rank, step, calls[c], &results[rank])) return;
    }
    if (!calls[c].k().empty()) Append(step, calls[c], &after);
    if (all && !CheckResults(step, calls[c], results, after)) return;
  }
  const bool complete =
      std::all_of(budget.begin(), budget.end(), [&](size_t b) { return b == calls.size() + 1; });
  if (!cut || complete) {
    previous_ = std::exchange(model_, std::move(after));
    next_step_ = step.number + 1;
  }
  if (cut) CutAndSettle();
}

bool KvProgram::CheckRefusals(const std::vector<v1::StepResponse>& responses) {
  for (const v1::StepResponse& response : responses) {
    for (const v1::RowRefusal& row : response.refused().rows()) {
      if (row.reason() == "KV_FULL" || row.reason() == "BEHIND_WINDOW") continue;
      if (row.reason() == "UNKNOWN_SEQUENCE" && !response.refused().rows(0).reason().empty() &&
          response.refused().rows(0).command()) {
        continue;  // the target of a fork that was refused
      }
      failure_ = absl::StrCat("refused: ", row.ShortDebugString());
      return false;
    }
  }
  return true;
}

void KvProgram::MakeRoom() {
  if (model_.empty()) return;
  auto victim = std::next(model_.begin(), Pick(static_cast<int64_t>(model_.size())));
  KvStep step;
  step.number = next_step_;
  if (spec_.numbering == KvNumbering::kSequences || victim->second.tables_sent) {
    step.commands.push_back(KvDropCommand{{victim->first}});
  }
  for (int rank = 0; rank < placement_.world_size(); ++rank) {
    v1::StepResponse response;
    if (!SendBegin(rank, step, &response)) return;
    if (response.has_refused()) {
      failure_ = absl::StrCat("a drop is refused: ", response.ShortDebugString());
      return;
    }
  }
  previous_ = model_;
  model_.erase(victim);
  ++next_step_;
}

}  // namespace ringattn::tests
