#include "worker/kv/step_streams.h"

#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/kv/kv_error.h"
#include "common/kv/step_metadata.h"
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

// One call of Steps. Requests are handled in order on the engine's thread. Slot n % kMaxInFlight
// holds request n from its arrival until its response was written, or until it is known that there
// is none. Requests in the stream's ring use no slot.
class StepStream final : public grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>,
                         public KvStream,
                         public StepRingOwner {
 public:
  StepStream(grpc::CallbackServerContext* context, KvStore* store, bool with_token,
             const StepHooks& hooks, StepRings* rings)
      : store_(store),
        rings_(rings),
        hooks_(OwnHooks(hooks)),
        session_(store, with_token, &hooks_),
        cut_off_(context) {}

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
    if (ring_ != nullptr) ring_->Stop();
    self.swap(self_);
  }

  bool OnRingRequest(const v1::StepRequest& request, StepRingWriter* responses) override {
    bool goes_on = false;
    store_->engine()->RunHere(
        [&](StepKernels* kernels) { goes_on = HandleInRing(request, kernels, responses); });
    return goes_on;
  }
  void OnRingError(const absl::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (ended_ || failure_.has_value()) return;
    hooks_.on_refused(StepErrorReason(status));
    Fail(ToGrpcStatus(status), /*now=*/false);
  }

 private:
  struct Slot {
    v1::StepRequest request;
    v1::StepResponse response;
  };

  // On the engine's thread.
  void Handle(uint64_t number, StepKernels* kernels) ABSL_LOCKS_EXCLUDED(mutex_) {
    Slot& slot = slots_[number % kMaxInFlight];
    std::shared_ptr<StepStream> self;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_ || failure_.has_value()) return;
      self = self_;
    }
    absl::Status status = session_.Execute(slot.request, self, kernels, &slot.response);
    if (status.ok() && slot.request.hello().has_ring()) {
      status = AttachRing(slot.request.hello().ring(), self, &slot.response);
    }
    absl::MutexLock lock(&mutex_);
    slot.request.Clear();
    if (!status.ok()) return Fail(ToGrpcStatus(status), /*now=*/false);
    ++computed_;
    Advance();
  }

  // The stream's hooks: calls in the ring count as such.
  StepHooks OwnHooks(const StepHooks& hooks) {
    StepHooks own = hooks;
    own.on_received_bytes = [this, &hooks](int64_t bytes) {
      in_ring_ ? hooks.on_ring_received_bytes(bytes) : hooks.on_received_bytes(bytes);
    };
    own.on_sent_bytes = [this, &hooks](int64_t bytes) {
      in_ring_ ? hooks.on_ring_sent_bytes(bytes) : hooks.on_sent_bytes(bytes);
    };
    return own;
  }

  // On the engine's thread, as all that follows hello. An earlier stream of the cache was ended
  // here, so its ring writes nothing after this.
  absl::Status AttachRing(const v1::StepRing& ring, std::shared_ptr<StepStream> self,
                          v1::StepResponse* response) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::StatusOr<std::shared_ptr<AttachedRing>> attached = rings_->Attach(ring, std::move(self));
    if (!attached.ok()) {
      hooks_.on_refused(StepErrorReason(attached.status()));
      return attached.status();
    }
    SetDuration(rings_->spin(), response->mutable_opened()->mutable_ring_spin());
    absl::MutexLock lock(&mutex_);
    ring_ = *std::move(attached);
    if (self_ == nullptr) ring_->Stop();  // OnDone came first
    return absl::OkStatus();
  }

  bool HandleInRing(const v1::StepRequest& request, StepKernels* kernels, StepRingWriter* responses)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<KvStream> self;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_ || failure_.has_value()) return false;
      self = self_;
    }
    ring_response_.Clear();
    in_ring_ = true;
    absl::Status status = session_.Execute(request, self, kernels, &ring_response_);
    in_ring_ = false;
    if (status.ok()) status = RespondInRing(responses);
    if (status.ok()) return true;
    absl::MutexLock lock(&mutex_);
    Fail(ToGrpcStatus(status), /*now=*/false);
    return false;
  }

  absl::Status RespondInRing(StepRingWriter* responses) {
    const auto bytes = static_cast<int64_t>(ring_response_.ByteSizeLong());
    if (bytes > responses->capacity()) {
      return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL",
                     absl::StrCat("the response has ", bytes, " bytes; a slot of the ring holds ",
                                  responses->capacity(), ": send the request on the stream"));
    }
    responses->Put(bytes,
                   [&](uint8_t* frame) { ring_response_.SerializeWithCachedSizesToArray(frame); });
    responses->Publish();
    return absl::OkStatus();
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
    if (!writing_) SkipUnanswered();
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

  // Frees the slots of requests that get no response.
  void SkipUnanswered() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (written_ < computed_ && slots_[written_ % kMaxInFlight].response.message_case() ==
                                       v1::StepResponse::MESSAGE_NOT_SET) {
      ++written_;
    }
  }

  KvStore* const store_;
  StepRings* const rings_;
  const StepHooks hooks_;

  // Engine's thread.
  StepSession session_;
  bool in_ring_ = false;
  v1::StepResponse ring_response_;

  // A slot belongs to the outstanding read, then to the engine, then to the outstanding write.
  Slot slots_[kMaxInFlight];

  absl::Mutex mutex_;
  std::shared_ptr<StepStream> self_ ABSL_GUARDED_BY(mutex_);  // null before Start, after OnDone
  CutOff cut_off_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<AttachedRing> ring_ ABSL_GUARDED_BY(mutex_);  // null: none
  uint64_t read_ ABSL_GUARDED_BY(mutex_) = 0;                   // requests
  uint64_t computed_ ABSL_GUARDED_BY(mutex_) = 0;               // responses
  uint64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool fails_now_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called
  std::optional<grpc::Status> failure_ ABSL_GUARDED_BY(mutex_);
};

// Checks the token in the call's metadata.
absl::Status CheckHelloOf(const grpc::ServerContextBase& context, const KvStore& store) {
  const auto [first, last] = context.client_metadata().equal_range(kStepHelloMetadataKey);
  v1::StepHello hello;
  if (first == last || std::next(first) != last ||
      !hello.ParseFromArray(first->second.data(), static_cast<int>(first->second.size()))) {
    return absl::UnauthenticatedError(absl::StrCat("the call's metadata must have one entry ",
                                                   kStepHelloMetadataKey,
                                                   ": the stream's StepHello, serialized"));
  }
  return store.CheckToken(hello);
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(std::string(status.message()));
  if (const std::string reason = StepErrorReason(status); !reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(kKvErrorDomain);
    details.add_details()->PackFrom(info);
  }
  return {static_cast<grpc::StatusCode>(status.code()), details.message(),
          details.SerializeAsString()};
}

KvShardServiceImpl::KvShardServiceImpl(KvStore* store, std::string secret, StepHooks hooks,
                                       StepRingOptions rings)
    : store_(store),
      secret_(std::move(secret)),
      hooks_(std::move(hooks)),
      rings_(std::move(rings)) {}

grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* KvShardServiceImpl::Steps(
    grpc::CallbackServerContext* context) {
  const bool with_token = secret_.empty();
  auto stream = std::make_shared<StepStream>(context, store_, with_token, hooks_, &rings_);
  StepStream* const reactor = stream.get();
  grpc::Status status;
  if (with_token) {
    const absl::Status checked = CheckHelloOf(*context, *store_);
    if (!checked.ok()) hooks_.on_refused(StepErrorReason(checked));
    status = ToGrpcStatus(checked);
  } else {
    status = CheckSecret(*context, secret_);
  }
  if (status.ok()) {
    reactor->Start(std::move(stream));
  } else {
    reactor->Reject(std::move(stream), std::move(status));
  }
  return reactor;
}

}  // namespace ringattn::worker
