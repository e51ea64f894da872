#include "worker/kv/step_streams.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "common/kv/kv_error.h"
#include "common/security/secret.h"
#include "common/wire/durations.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "worker/operation/cut_off.h"

namespace ringattn::worker {
namespace {

// Requests whose responses are not sent yet: one is computed while the next one arrives.
constexpr uint64_t kMaxInFlight = 2;
// From the end of a stream to the end of its call, for a peer that reads nothing.
constexpr absl::Duration kTimeToLeave = absl::Seconds(2);

std::string ReasonOf(const absl::Status& status) {
  const std::string reason = KvErrorReason(status);
  if (!reason.empty()) return reason;
  if (absl::IsResourceExhausted(status)) return "OVER_LIMIT";
  if (absl::IsInvalidArgument(status) || absl::IsUnimplemented(status)) return "INVALID_REQUEST";
  return "";
}

int64_t TensorBytes(const v1::LayerCall& call) {
  return static_cast<int64_t>(call.q().size() + call.k().size() + call.v().size());
}

// One call of Steps. Requests are handled in order on the engine's thread. Slot n % kMaxInFlight
// holds request n from its arrival until its response was written.
class StepStream final : public grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>,
                         public KvStream {
 public:
  StepStream(grpc::CallbackServerContext* context, KvStore* store, bool with_token,
             const StepHooks* hooks)
      : store_(store), with_token_(with_token), hooks_(hooks), cut_off_(context) {}

  // Called once. `self` is released when the call is done.
  void Start(std::shared_ptr<StepStream> self) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    self_ = std::move(self);
    Advance();
  }
  void Reject(std::shared_ptr<StepStream> self, grpc::Status status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    self_ = std::move(self);
    ended_ = true;
    Finish(std::move(status));
  }

  void End(const absl::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Fail(ToGrpcStatus(status), /*now=*/true);
  }

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (!ok) {
      half_closed_ = true;
      return Advance();
    }
    if (ended_ || failure_.has_value()) return;
    if (store_->engine() == nullptr) {
      return Fail(ToGrpcStatus(absl::UnimplementedError("this worker serves no K/V caches")),
                  /*now=*/true);
    }
    // Post before Advance starts the next read: another thread may finish that read at once, and
    // the engine must receive requests in their order.
    store_->engine()->Post(
        [self = self_, number = read_++](StepKernels* kernels) { self->Handle(number, kernels); });
    Advance();
  }

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    slots_[written_++ % kMaxInFlight].response.Clear();
    if (!ok) Fail({grpc::StatusCode::CANCELLED, "the peer is gone"}, /*now=*/true);
    Advance();
  }

  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Fail({grpc::StatusCode::CANCELLED, "the call was cancelled"}, /*now=*/true);
  }

  void OnDone() override ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<StepStream> self;  // destroyed after the lock: it may be the last reference
    absl::MutexLock lock(&mutex_);
    self.swap(self_);
  }

 private:
  struct Slot {
    v1::StepRequest request;
    v1::StepResponse response;
  };

  // On the engine's thread.
  void Handle(uint64_t number, StepKernels* kernels) ABSL_LOCKS_EXCLUDED(mutex_) {
    Slot& slot = slots_[number % kMaxInFlight];
    {
      absl::MutexLock lock(&mutex_);
      if (ended_ || failure_.has_value()) return;
    }
    const absl::Status status = Execute(slot.request, kernels, &slot.response);
    if (!status.ok()) hooks_->on_refused(ReasonOf(status));
    absl::MutexLock lock(&mutex_);
    slot.request.Clear();
    if (!status.ok()) return Fail(ToGrpcStatus(status), /*now=*/false);
    ++computed_;
    Advance();
  }

  absl::Status Execute(const v1::StepRequest& request, StepKernels* kernels,
                       v1::StepResponse* response) {
    if (request.has_hello()) return Hello(request.hello(), response);
    if (cache_ == nullptr) {
      return absl::InvalidArgumentError("the first message of a stream must be hello");
    }
    KvShard* const shard = cache_->shard();
    // End has been called, or will be soon.
    if (shard == nullptr) return absl::DataLossError("the cache has ended");
    absl::Status status;
    switch (request.message_case()) {
      case v1::StepRequest::kBegin:
        status = shard->Begin(epoch_, request.begin(), response);
        NoteBegin(*response, status);
        break;
      case v1::StepRequest::kCall:
        status = shard->Call(epoch_, request.call(), kernels, cache_->stop(),
                             response->mutable_result());
        if (status.ok()) NoteCall(request.call(), response->result());
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

  absl::Status Hello(const v1::StepHello& hello, v1::StepResponse* response) {
    if (cache_ != nullptr) return absl::InvalidArgumentError("hello was sent before");
    std::shared_ptr<KvStream> self;
    {
      absl::MutexLock lock(&mutex_);
      self = self_;
    }
    auto cache = store_->Attach(hello, with_token_, self);
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

  void NoteBegin(const v1::StepResponse& response, const absl::Status& status) {
    if (!status.ok()) return;
    if (response.has_accepted()) return hooks_->on_step();
    for (const v1::RowRefusal& row : response.refused().rows()) hooks_->on_refused(row.reason());
  }

  void NoteCall(const v1::LayerCall& call, const v1::LayerResult& result) {
    hooks_->on_call(ToDuration(result.device_time()));
    hooks_->on_received_bytes(TensorBytes(call));
    hooks_->on_sent_bytes(static_cast<int64_t>(result.out().size() + result.lse().size()));
  }

  // `now`: drops responses that are not being written.
  void Fail(grpc::Status status, bool now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!failure_.has_value()) failure_ = std::move(status);
    fails_now_ |= now;
    Advance();
  }

  // Starts the next read and write, or finishes the call, where one is due.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_ || self_ == nullptr) return;
    if (failure_.has_value()) {
      if (writing_) return cut_off_.Arm(kTimeToLeave);
      if (fails_now_ || written_ == computed_) {
        ended_ = true;
        return Finish(*failure_);
      }
    }
    if (!writing_ && written_ < computed_) {
      writing_ = true;
      StartWrite(&slots_[written_ % kMaxInFlight].response);
    }
    if (failure_.has_value()) return;
    if (half_closed_ && written_ == read_) {
      ended_ = true;
      return Finish(grpc::Status::OK);
    }
    if (!half_closed_ && !reading_ && read_ - written_ < kMaxInFlight) {
      reading_ = true;
      StartRead(&slots_[read_ % kMaxInFlight].request);
    }
  }

  KvStore* const store_;
  const bool with_token_;
  const StepHooks* const hooks_;

  // Engine's thread.
  std::shared_ptr<KvCache> cache_;
  uint64_t epoch_ = 0;

  // A slot belongs to the outstanding read, then to the engine, then to the outstanding write.
  Slot slots_[kMaxInFlight];

  absl::Mutex mutex_;
  std::shared_ptr<StepStream> self_ ABSL_GUARDED_BY(mutex_);  // null before Start, after OnDone
  CutOff cut_off_ ABSL_GUARDED_BY(mutex_);
  uint64_t read_ ABSL_GUARDED_BY(mutex_) = 0;      // requests
  uint64_t computed_ ABSL_GUARDED_BY(mutex_) = 0;  // responses
  uint64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool fails_now_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called
  std::optional<grpc::Status> failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(std::string(status.message()));
  if (const std::string reason = ReasonOf(status); !reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(kKvErrorDomain);
    details.add_details()->PackFrom(info);
  }
  return {static_cast<grpc::StatusCode>(status.code()), details.message(),
          details.SerializeAsString()};
}

KvShardServiceImpl::KvShardServiceImpl(KvStore* store, std::string secret, StepHooks hooks)
    : store_(store), secret_(std::move(secret)), hooks_(std::move(hooks)) {}

grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* KvShardServiceImpl::Steps(
    grpc::CallbackServerContext* context) {
  const bool with_token = secret_.empty();
  auto stream = std::make_shared<StepStream>(context, store_, with_token, &hooks_);
  StepStream* const reactor = stream.get();
  grpc::Status status = with_token ? grpc::Status::OK : CheckSecret(*context, secret_);
  if (status.ok()) {
    reactor->Start(std::move(stream));
  } else {
    reactor->Reject(std::move(stream), std::move(status));
  }
  return reactor;
}

}  // namespace ringattn::worker
