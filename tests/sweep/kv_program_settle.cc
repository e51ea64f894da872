#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sweep/kv_program.h"

namespace ringattn::tests {

void KvProgram::CutAndSettle() {
  ++epoch_;
  uint64_t step = 0;
  for (auto& shard : shards_) {
    if (!Check(shard->log().Open(epoch_), "open")) return;
    step = std::max(step, shard->log().committed());
  }
  if (Chance(2)) step = next_step_ - 1;
  for (auto& shard : shards_) {
    if (shard->log().complete() < step) {
      failure_ = absl::StrCat("a rank has completed ", shard->log().complete(), ", not ", step);
      return;
    }
  }
  Settle(step);
  if (!failure_.empty()) return;
  if (step + 1 < next_step_) model_ = previous_;
  next_step_ = step + 1;
  if (spec_.numbering == KvNumbering::kBlocks) CutUndoneRows(step);
  TakeLengths();
}

void KvProgram::Settle(uint64_t step) {
  for (auto& shard : shards_) {
    if (epoch_ == 1 && !Check(shard->log().Open(epoch_), "open")) return;
    if (!Check(shard->log().Settle(epoch_, step), "settle")) return;
  }
}

void KvProgram::CutUndoneRows(uint64_t settled) {
  for (const KvStep& step : recent_) {
    if (step.number <= settled) continue;
    for (const StepRow& row : step.rows) {
      const auto found = model_.find(row.sequence);
      if (found == model_.end()) continue;
      Cut(std::min(row.keep_length, found->second.length), &found->second);
    }
  }
}

void KvProgram::TakeLengths() {
  for (auto& [id, sequence] : model_) sequence.tables_sent = false;
  if (spec_.numbering == KvNumbering::kBlocks) return;
  for (auto& shard : shards_) {
    const auto list = shard->log().blocks().sequences();
    if (list.size() != model_.size()) {
      failure_ = absl::StrCat("a rank has ", list.size(), " sequences, not ", model_.size());
      return;
    }
    for (const auto& [id, length] : list) {
      const auto found = model_.find(id);
      if (found == model_.end() || length > found->second.length) {
        // Lengths only shrink here: an earlier rank may have been the shortest.
        if (found != model_.end() && shrunk_.contains(id)) continue;
        failure_ = absl::StrCat("sequence ", id, " has ", length, " entries after settling");
        return;
      }
      if (length < found->second.length) shrunk_.insert(id);
      Cut(length, &found->second);
    }
  }
  shrunk_.clear();
}

}  // namespace ringattn::tests
