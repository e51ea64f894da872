#include "worker/kv/step_session.h"

#include <utility>

#include "common/kv/kv_error.h"
#include "common/wire/durations.h"
#include "worker/kv/kv_shard.h"

namespace ringattn::worker {
namespace {

int64_t TensorBytes(const v1::LayerCall& call) {
  return static_cast<int64_t>(call.q().size() + call.k().size() + call.v().size());
}

}  // namespace

std::string StepErrorReason(const absl::Status& status) {
  const std::string reason = KvErrorReason(status);
  if (!reason.empty()) return reason;
  if (absl::IsResourceExhausted(status)) return "OVER_LIMIT";
  if (absl::IsInvalidArgument(status) || absl::IsUnimplemented(status)) return "INVALID_REQUEST";
  return "";
}

StepSession::StepSession(KvStore* store, bool with_token, const StepHooks* hooks)
    : store_(store), with_token_(with_token), hooks_(hooks) {}

absl::Status StepSession::Execute(const v1::StepRequest& request,
                                  const std::shared_ptr<KvStream>& stream, StepKernels* kernels,
                                  v1::StepResponse* response) {
  absl::Status status = Dispatch(request, stream, kernels, response);
  if (!status.ok()) hooks_->on_refused(StepErrorReason(status));
  return status;
}

absl::Status StepSession::Dispatch(const v1::StepRequest& request,
                                   const std::shared_ptr<KvStream>& stream, StepKernels* kernels,
                                   v1::StepResponse* response) {
  if (request.has_hello()) return Hello(request.hello(), stream, response);
  if (cache_ == nullptr) {
    return absl::InvalidArgumentError("the first message of a stream must be hello");
  }
  KvShard* const shard = cache_->shard();
  // The stream's End has been called, or will be soon.
  if (shard == nullptr) return absl::DataLossError("the cache has ended");
  absl::Status status;
  switch (request.message_case()) {
    case v1::StepRequest::kBegin:
      status = Begin(request.begin(), response);
      break;
    case v1::StepRequest::kCall:
      status = Call(request.call(), kernels, response);
      break;
    case v1::StepRequest::kCommit:
      status = shard->log().Commit(epoch_, request.commit().step());
      response->mutable_committed()->set_step(request.commit().step());
      break;
    default:
      status = absl::InvalidArgumentError("a message is empty; set begin, call or commit");
  }
  cache_->Publish(store_->now(), status.ok());
  return status;
}

absl::Status StepSession::Hello(const v1::StepHello& hello, const std::shared_ptr<KvStream>& stream,
                                v1::StepResponse* response) {
  if (cache_ != nullptr) return absl::InvalidArgumentError("hello was sent before");
  auto cache = store_->Attach(hello, with_token_, stream);
  if (!cache.ok()) return cache.status();
  if ((*cache)->shard() == nullptr) return absl::DataLossError("the cache has ended");
  cache_ = *std::move(cache);
  epoch_ = hello.epoch();
  const KvStepLog& log = cache_->shard()->log();
  v1::StepOpened* opened = response->mutable_opened();
  opened->set_next_step(log.committed() + 1);
  for (const auto& [id, length] : log.blocks().sequences()) {
    v1::KvSequence* sequence = opened->add_sequences();
    sequence->set_sequence(id);
    sequence->set_length(static_cast<uint64_t>(length));
  }
  return absl::OkStatus();
}

absl::Status StepSession::Begin(const v1::StepBegin& begin, v1::StepResponse* response) {
  if (auto status = cache_->shard()->Begin(epoch_, begin, response); !status.ok()) return status;
  refused_step_.reset();
  if (response->has_accepted()) {
    response->mutable_accepted()->set_leaving(store_->leaving());
    hooks_->on_step();
    return absl::OkStatus();
  }
  refused_step_ = begin.step();
  for (const v1::RowRefusal& row : response->refused().rows()) hooks_->on_refused(row.reason());
  return absl::OkStatus();
}

absl::Status StepSession::Call(const v1::LayerCall& call, StepKernels* kernels,
                               v1::StepResponse* response) {
  if (refused_step_.has_value() && call.step() == *refused_step_) return absl::OkStatus();
  v1::LayerResult* result = response->mutable_result();
  auto status = cache_->shard()->Call(epoch_, call, kernels, cache_->stop(), result);
  if (!status.ok()) return status;
  hooks_->on_call(ToDuration(result->device_time()));
  hooks_->on_received_bytes(TensorBytes(call));
  hooks_->on_sent_bytes(static_cast<int64_t>(result->out().size() + result->lse().size()));
  return absl::OkStatus();
}

}  // namespace ringattn::worker
