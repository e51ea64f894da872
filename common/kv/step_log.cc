#include "common/kv/step_log.h"

#include <cassert>

#include "absl/strings/str_cat.h"
#include "common/kv/kv_error.h"

namespace ringattn {
namespace {

absl::Status Fenced(uint64_t epoch, uint64_t newest, absl::StatusCode code) {
  return KvError(
      code, "KV_FENCED",
      absl::StrCat("epoch ", epoch, " is not the writer's; the newest epoch is ", newest));
}

absl::Status StepOrder(absl::string_view message) {
  return KvError(absl::StatusCode::kFailedPrecondition, "STEP_ORDER", message);
}

}  // namespace

KvStepLog::KvStepLog(const KvCacheSpec& spec, const KvPlacement& placement)
    : blocks_(spec, placement) {
  for (const KvLayerGroup& group : spec.groups) {
    for (const uint32_t layer : group.layers) appended_.emplace(layer, false);
  }
}

absl::Status KvStepLog::Open(uint64_t epoch) {
  if (epoch < epoch_) {
    return Fenced(epoch, epoch_, absl::StatusCode::kFailedPrecondition);
  }
  if (epoch > epoch_) settled_ = false;
  epoch_ = epoch;
  return absl::OkStatus();
}

absl::Status KvStepLog::Settle(uint64_t epoch, uint64_t step) {
  if (epoch != epoch_) return Fenced(epoch, epoch_, absl::StatusCode::kFailedPrecondition);
  const auto inconsistent = [&](absl::string_view why) {
    return KvError(absl::StatusCode::kFailedPrecondition, "KV_INCONSISTENT",
                   absl::StrCat("the log cannot end with step ", step, ": ", why));
  };
  if (settled_) {
    if (step == settled_step_) return absl::OkStatus();
    return inconsistent(absl::StrCat("epoch ", epoch, " was settled with step ", settled_step_));
  }
  in_flight_ = 0;
  if (step == committed_) {
    if (begun_.has_value()) blocks_.Undo();
    ForgetStep();
  } else if (step == committed_ + 1 && begun_.has_value() && complete() == step) {
    if (auto status = CommitBegun(); !status.ok()) return status;
  } else {
    return inconsistent(absl::StrCat("this rank has committed step ", committed_,
                                     " and completed step ", complete()));
  }
  blocks_.Settle();
  settled_ = true;
  settled_step_ = step;
  return absl::OkStatus();
}

absl::StatusOr<KvStepLog::Begun> KvStepLog::Begin(uint64_t epoch, const KvStep& step) {
  if (auto status = CheckEpoch(epoch); !status.ok()) return status;
  if (begun_.has_value() && step.number == begun_->number) {
    if (step == *begun_) return Begun{.repeated = true};
    return KvError(absl::StatusCode::kFailedPrecondition, "STEP_CONFLICT",
                   absl::StrCat("step ", step.number, " was begun with other commands or rows"));
  }
  const uint64_t next = committed_ + (begun_.has_value() ? 2 : 1);
  if (step.number != next) {
    return StepOrder(absl::StrCat("step ", step.number, " cannot begin; the next one is ", next));
  }
  if (begun_.has_value()) {
    if (auto status = CommitBegun(); !status.ok()) return status;
  }
  Begun begun{.refusals = blocks_.Begin(step)};
  if (begun.refusals.empty()) begun_ = step;
  return begun;
}

absl::Status KvStepLog::StartCall(uint64_t epoch, uint64_t step, uint32_t layer, bool appends) {
  if (auto status = CheckEpoch(epoch); !status.ok()) return status;
  if (!begun_.has_value() || step != begun_->number) {
    return StepOrder(absl::StrCat(
        "a call belongs to step ", step, "; ",
        begun_.has_value() ? absl::StrCat("step ", begun_->number) : std::string("no step"),
        " is begun"));
  }
  const auto found = appended_.find(layer);
  if (found == appended_.end()) {
    return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL",
                   absl::StrCat("layer is ", layer, "; no group of the cache has that layer"));
  }
  if (!appends && !found->second && begun_->append_tokens() > 0) {
    return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL",
                   absl::StrCat("layer ", layer,
                                " is read before the step's append to it; send k "
                                "and v with the layer's first call"));
  }
  ++in_flight_;
  return absl::OkStatus();
}

void KvStepLog::FinishCall(uint32_t layer, bool appends) {
  assert(in_flight_ > 0);
  --in_flight_;
  if (!appends) return;
  bool& appended = appended_.at(layer);
  if (!appended) ++num_appended_;
  appended = true;
}

absl::Status KvStepLog::Commit(uint64_t epoch, uint64_t step) {
  if (auto status = CheckEpoch(epoch); !status.ok()) return status;
  if (step == committed_ && !begun_.has_value()) return absl::OkStatus();
  if (!begun_.has_value() || step != begun_->number) {
    return StepOrder(absl::StrCat("step ", step, " cannot be committed; ", committed_,
                                  " is the last committed step"));
  }
  return CommitBegun();
}

uint64_t KvStepLog::complete() const {
  if (!begun_.has_value() || in_flight_ > 0) return committed_;
  if (begun_->append_tokens() > 0 && num_appended_ < appended_.size()) return committed_;
  return begun_->number;
}

absl::Status KvStepLog::CheckEpoch(uint64_t epoch) const {
  if (settled_ && epoch == epoch_) return absl::OkStatus();
  return Fenced(epoch, epoch_, absl::StatusCode::kAborted);
}

absl::Status KvStepLog::CommitBegun() {
  if (complete() != begun_->number) {
    return StepOrder(absl::StrCat("step ", begun_->number, " is not complete: ", num_appended_,
                                  " of ", appended_.size(), " layers were appended, ", in_flight_,
                                  " calls are being computed"));
  }
  blocks_.Commit();
  committed_ = begun_->number;
  ForgetStep();
  return absl::OkStatus();
}

void KvStepLog::ForgetStep() {
  begun_.reset();
  for (auto& [layer, appended] : appended_) appended = false;
  num_appended_ = 0;
}

}  // namespace ringattn
