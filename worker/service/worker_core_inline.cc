// WorkerCore's part in inline operations (worker/operation/inline_run.h).
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/wire/durations.h"
#include "worker/operation/inline_run.h"
#include "worker/service/operation_runner.h"
#include "worker/service/worker_core.h"
#include "worker/service/worker_metrics.h"

namespace ringattn::worker {

void WorkerCore::RunInline(const v1::Reserve& reserve,
                           const std::shared_ptr<ShardOperation>& operation,
                           v1::Reserved reserved) {
  const v1::InlineRun& run = reserve.inline_run();
  if (absl::Status status = WriteInlineInputs(run, *operation); !status.ok()) {
    v1::JoinRequest message;
    reserved.set_ok(false);
    reserved.set_malformed(absl::IsInvalidArgument(status));
    reserved.set_reason(std::string(status.message()));
    *message.mutable_reserved() = std::move(reserved);
    return AnswerInline(operation->info(), std::move(message));
  }
  for (const v1::InlineTensor& input : run.inputs()) metrics_->CountReceived(input.data().size());
  {
    absl::MutexLock lock(&inline_mutex_);
    inline_runs_[reserve.operation_id()] = std::move(reserved);
  }
  if (run.has_preempt_after()) {
    runner_.Preempt(operation, ToDuration(run.preempt_after()));
  } else if (IsShort(operation->operation().spec(), operation->operation().program())) {
    runner_.RunOrEnqueue(operation);
  } else {
    runner_.Run(operation);
  }
}

std::optional<v1::Reserved> WorkerCore::FindInline(const std::string& id) {
  absl::MutexLock lock(&inline_mutex_);
  const auto found = inline_runs_.find(id);
  if (found == inline_runs_.end()) return std::nullopt;
  return found->second;
}

void WorkerCore::AnswerInline(const OperationInfo& info, v1::JoinRequest answer) {
  {
    absl::MutexLock lock(&inline_mutex_);
    inline_runs_.erase(info.id);
    inline_answers_[info.id] = std::move(answer);
  }
  registry_.Release(info.id, info.generation);
}

void WorkerCore::ForgetInline() {
  absl::MutexLock lock(&inline_mutex_);
  inline_runs_.clear();
  inline_answers_.clear();
}

void WorkerCore::TakeOutputs(const ShardOperation& operation, v1::Finished* finished) {
  const absl::Status status = ReadInlineOutputs(operation, finished->mutable_outputs());
  if (status.ok()) {
    for (const v1::TensorChunk& output : finished->outputs()) {
      metrics_->CountSent(output.data().size());
    }
    return;
  }
  finished->set_ok(false);
  finished->set_reason(std::string(status.message()));
  finished->clear_outputs();
}

}  // namespace ringattn::worker
