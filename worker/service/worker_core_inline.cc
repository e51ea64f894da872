// WorkerCore's part in inline operations (worker/operation/inline_run.h).
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "common/plan/kernel_rate.h"
#include "common/wire/durations.h"
#include "worker/operation/inline_run.h"
#include "worker/region/region_transfer.h"
#include "worker/service/operation_runner.h"
#include "worker/service/run_report.h"
#include "worker/service/slowdown.h"
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
    inline_runs_[reserve.operation_id()] = {std::move(reserved), received_, {}, nullptr};
  }
  operation->operation().control().polls = !device_.is_host_memory();
  StartInline(run, operation,
              IsShort(operation->operation().spec(), operation->operation().program()));
}

bool WorkerCore::RunInlineInMemory(const v1::Reserve& reserve,
                                   const std::shared_ptr<ShardOperation>& operation,
                                   const v1::Reserved& reserved) {
  if (options_.local_memory == nullptr || operation->operation().members().size() != 1) {
    return false;
  }
  const bool host = device_.is_host_memory();
  const std::shared_ptr<RegionTransfer> copies =
      options_.local_memory->MakeInline(operation, reserve, host);
  if (copies == nullptr) return false;
  const absl::Time begin = MonotonicNow();
  const absl::Status status = copies->CopyInputsInline(host);
  const absl::Duration copied = host ? MonotonicNow() - begin : absl::ZeroDuration();
  {
    absl::MutexLock lock(&inline_mutex_);
    inline_runs_[reserve.operation_id()] = {reserved, received_, copied, copies};
  }
  if (!status.ok()) {
    options_.local_memory->ReportFailure(operation->info(), absl::IsCancelled(status),
                                         std::string(status.message()));
    v1::JoinRequest message;
    v1::Finished* finished = message.mutable_finished();
    finished->set_operation_id(reserve.operation_id());
    finished->set_generation(reserve.generation());
    finished->set_reason(std::string(status.message()));
    *finished->mutable_reserved() = reserved;
    AnswerInline(operation->info(), std::move(message));
    return true;
  }
  operation->operation().control().polls = !host;
  const bool is_short =
      host ? IsShort(operation->operation().spec(), operation->operation().program())
           : IsShortOnDevice(operation->operation(),
                             reserve.backward() ? Direction::kBackward : Direction::kForward,
                             copies->received_bytes());
  StartInline(reserve.inline_run(), operation, is_short);
  return true;
}

void WorkerCore::StartInline(const v1::InlineRun& run,
                             const std::shared_ptr<ShardOperation>& operation, bool is_short) {
  if (run.has_preempt_after()) return runner_.Preempt(operation, ToDuration(run.preempt_after()));
  if (is_short) return runner_.RunOrEnqueue(operation);
  runner_.Run(operation);
}

bool WorkerCore::IsShortOnDevice(const Operation& operation, Direction direction,
                                 int64_t copied_bytes) const {
  constexpr double kShortSeconds = 1e-3;
  // 40 us at 55 GB/s. With larger copies, other operations' copies should start meanwhile.
  constexpr int64_t kShortBytes = 2 * kMiB;
  if (copied_bytes > kShortBytes) return false;
  const KernelRate* const rate = RateOf(options_.kernel_rates, operation.spec(), direction);
  if (rate == nullptr) return false;
  return FlopsOf(operation) * SlowdownOf(operation, options_.kernel_rates) <=
         kShortSeconds * rate->flops_per_second;
}

std::optional<WorkerCore::InlineOperation> WorkerCore::FindInline(const std::string& id) {
  absl::MutexLock lock(&inline_mutex_);
  const auto found = inline_runs_.find(id);
  if (found == inline_runs_.end()) return std::nullopt;
  return found->second;
}

void WorkerCore::AnswerRun(ShardOperation& operation, const InlineOperation& run,
                           v1::JoinRequest message) {
  v1::Finished* const finished = message.mutable_finished();
  *finished->mutable_reserved() = run.reserved;
  v1::RankReport* const report = finished->mutable_report();
  if (finished->ok() && run.copies == nullptr) TakeOutputs(operation, finished);
  if (finished->ok() && run.copies != nullptr) {
    SetDuration(run.copy_in + operation.upload_copies().total, report->mutable_copy_in_time());
    const absl::Time begin = MonotonicNow();
    CopyOutputs(operation, *run.copies, finished);
    SetDuration(MonotonicNow() - begin, report->mutable_copy_out_time());
  }
  SetDuration(MonotonicNow() - run.received, report->mutable_service_time());
  AnswerInline(operation.info(), std::move(message));
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

void WorkerCore::CopyOutputs(const ShardOperation& operation, RegionTransfer& copies,
                             v1::Finished* finished) {
  const absl::StatusOr<bool> copied = copies.CopyOutputsInline(device_.is_host_memory());
  if (copied.ok() && *copied) return;
  const std::string why = copied.ok() ? "the client released the region or fenced it"
                                      : std::string(copied.status().message());
  options_.local_memory->ReportFailure(operation.info(), /*released=*/copied.ok(), why);
  finished->set_ok(false);
  finished->set_reason(why);
}

}  // namespace ringattn::worker
