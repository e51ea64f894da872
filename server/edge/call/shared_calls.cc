#include "server/edge/call/shared_calls.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/base/monotonic_time.h"
#include "common/wire/calls_frame.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/call_header.h"
#include "server/edge/call/calls_streams.h"
#include "server/edge/call/request_call.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

using wire::CallsRequestFrame;
using wire::CallsResponseFrame;

// Any number of threads use the stream at the same time, each between Enter() and Leave(). The last
// one to leave finishes it. No lock is held while a call is served or gRPC is called.
class SharedCalls final : public ByteStreamReactor, public CallsStreams::Stream {
 public:
  SharedCalls(const RequestContext* context, grpc::CallbackServerContext* call)
      : context_(context), call_(call) {
    Enter();
    Open();
    Advance();
    Leave();
  }

  void OnReadDone(bool ok) override {
    Enter();
    if (ok) {
      Take(wire::DecodeCallsRequest(incoming_));
      incoming_.Clear();
    }
    {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
      half_closed_ |= !ok;
    }
    Advance();
    Leave();
  }

  void OnWriteDone(bool ok) override {
    Enter();
    const Outgoing written = std::exchange(in_flight_, {});
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (!ok) Break();
    Settle(written, ok);
    Advance();
    Leave();
  }

  void OnCancel() override {
    Enter();
    Break();
    Advance();
    Leave();
  }

  void OnClosed() override {
    Enter();
    EndWith(ToGrpcStatus(ServerEnds(context_->retry_after), context_->limits));
    Leave();
  }

  void OnDone() override {
    context_->calls_streams->Leave(this);
    // Waits until the last thread has released the lock.
    { absl::MutexLock lock(&mutex_); }
    delete this;
  }

 private:
  // One call. Lives until its end has been sent, or the stream has broken.
  class Call final : public ClientStream, public std::enable_shared_from_this<Call> {
   public:
    Call(SharedCalls* stream, CallsRequestFrame first)
        : stream_(stream), first_(std::move(first)) {}

    uint64_t number() const { return first_.call; }

    void SetUser(User* user) override { user_ = user; }
    // After the first message, the client can send nothing for this call.
    void Read(grpc::ByteBuffer* message) override {
      const bool is_first = !std::exchange(has_read_, true);
      if (is_first) message->Swap(&first_.message);
      user_->OnReadDone(is_first);
    }
    void Write(const grpc::ByteBuffer* message, bool) override {
      stream_->Send({Encode(message, std::nullopt), shared_from_this()});
    }
    void WriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status) override {
      stream_->Send({Encode(message, status), shared_from_this(), true});
    }
    void Finish(const grpc::Status& status) override {
      stream_->Send({Encode(nullptr, status), shared_from_this(), true});
    }
    bool IsCancelled() const override { return cancelled_.load(); }
    // The client reads no message of any call.
    void TryCancel() override { stream_->call_->TryCancel(); }
    void CutOff(const grpc::Status&) override { stream_->call_->TryCancel(); }

    void NoteCancelled() { cancelled_.store(true); }
    User* user() const { return user_; }

    // Guarded by the stream's lock. OnDone waits for the callbacks in progress.
    int callbacks = 0;
    bool is_sent = false;  // its end, or the stream has broken
    // A cancellation waits until the call is being served.
    bool is_served = false, cancels_once_served = false;

   private:
    grpc::ByteBuffer Encode(const grpc::ByteBuffer* message,
                            const std::optional<grpc::Status>& end) const {
      CallsResponseFrame frame{.call = number(), .end = end};
      if (message != nullptr) {
        frame.kind = first_.kind;
        frame.message = *message;
      }
      return wire::EncodeCallsResponse(frame);
    }

    SharedCalls* const stream_;
    CallsRequestFrame first_;
    bool has_read_ = false;
    User* user_ = nullptr;
    std::atomic<bool> cancelled_{false};
  };

  struct Outgoing {
    grpc::ByteBuffer message;
    std::shared_ptr<Call> call;  // null: it answers a message that began no call
    bool ends = false;           // the call's last
  };

  void Enter() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++inside_;
  }

  void Leave() ABSL_LOCKS_EXCLUDED(mutex_) {
    grpc::Status status;
    {
      absl::MutexLock lock(&mutex_);
      const bool ends = half_closed_ || broken_ || status_.has_value();
      const bool is_idle = !writing_ && outgoing_.empty() && open_ == 0;
      if (--inside_ > 0 || finished_ || !ends || !is_idle) return;
      finished_ = true;
      status = status_.value_or(grpc::Status::OK);
    }
    Finish(status);
  }

  void Open() ABSL_LOCKS_EXCLUDED(mutex_) {
    const std::variant<Caller, grpc::Status> caller = context_->callers->Identify(*call_);
    if (const auto* refused = std::get_if<grpc::Status>(&caller)) return EndWith(*refused);
    const std::optional<Failure> full = context_->calls_streams->Enter(
        this, std::get<Caller>(caller).client, context_->retry_after);
    if (full.has_value()) EndWith(ToGrpcStatus(*full, context_->limits));
  }

  // Begins no further call. The stream ends with this status.
  void EndWith(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (!status_.has_value()) status_ = status;
  }

  // Starts the read and the write that may start.
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_) {
    bool reads = false, writes = false, more_follows = false;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      const bool ends = half_closed_ || broken_ || status_.has_value();
      reads = !ends && !reading_ && open_ < context_->limits.max_calls_per_stream;
      if (reads) reading_ = true;
      writes = !writing_ && !outgoing_.empty();
      if (writes) {
        writing_ = true;
        in_flight_ = std::move(outgoing_.front());
        outgoing_.pop_front();
        // The first message carries the initial metadata, whose write ends only once it is flushed.
        more_follows = !outgoing_.empty() && has_written_;
        has_written_ = true;
      }
    }
    if (writes) {
      grpc::WriteOptions options;
      if (more_follows) options.set_buffer_hint();
      StartWrite(&in_flight_.message, options);
    }
    if (reads) StartRead(&incoming_);
  }

  void Take(absl::StatusOr<CallsRequestFrame> frame) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (!frame.ok()) {
      return RejectStream("message",
                          absl::StrCat("is not a CallsRequest: ", frame.status().message()));
    }
    if (frame->cancels) return CancelCall(frame->call);
    const uint64_t number = frame->call;
    const std::variant<Caller, grpc::Status> caller = context_->callers->Identify(*call_);
    if (const auto* refused = std::get_if<grpc::Status>(&caller)) {
      // The client has been removed from the clients file.
      return Send({wire::EncodeCallsResponse({.call = number, .end = *refused}), nullptr});
    }
    CallOrigin origin;
    if (frame->timeout.has_value()) origin.deadline = MonotonicNow() + *frame->timeout;
    origin.traceparent = ValidTraceparent(frame->traceparent);
    const Direction direction =
        frame->kind == wire::CarriedKind::kForward ? Direction::kForward : Direction::kBackward;
    auto call = std::make_shared<Call>(this, *std::move(frame));
    {
      absl::MutexLock lock(&mutex_);
      if (broken_) return;
      if (!calls_.emplace(number, call).second) {
        call = nullptr;
      } else {
        ++open_;
      }
    }
    if (call == nullptr) {
      return RejectStream("call", absl::StrCat("is ", number, ", a call in progress"));
    }
    context_->metrics->CarriedCall();
    RequestCall::Serve(context_, call.get(), direction, std::get<Caller>(caller),
                       std::move(origin));
    bool cancels = false;
    {
      absl::MutexLock lock(&mutex_);
      call->is_served = true;
      cancels = call->cancels_once_served;
    }
    if (cancels) Cancel(*call);
  }

  // The client breaks the protocol, so nothing that it sends can be trusted.
  void RejectStream(const std::string& field, std::string why) ABSL_LOCKS_EXCLUDED(mutex_) {
    Rejection rejection;
    rejection.violations = {{field, std::move(why)}};
    EndWith(ToGrpcStatus(rejection, context_->limits));
    for (const std::shared_ptr<Call>& call : Calls()) Cancel(*call);
  }

  std::vector<std::shared_ptr<Call>> Calls() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::shared_ptr<Call>> calls;
    absl::MutexLock lock(&mutex_);
    for (const auto& [number, call] : calls_) calls.push_back(call);
    return calls;
  }

  void CancelCall(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<Call> call;
    {
      absl::MutexLock lock(&mutex_);
      const auto found = calls_.find(number);
      if (found == calls_.end()) return;
      call = found->second;
    }
    Cancel(*call);
  }

  void Cancel(Call& call) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      call.cancels_once_served = true;
      if (call.is_sent || !call.is_served) return;
      ++call.callbacks;
    }
    call.NoteCancelled();
    call.user()->OnCancel();
    bool done = false;
    {
      absl::MutexLock lock(&mutex_);
      done = --call.callbacks == 0 && call.is_sent;
    }
    if (done) End(call);
  }

  // The client receives nothing more.
  void Break() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::deque<Outgoing> lost;
    {
      absl::MutexLock lock(&mutex_);
      broken_ = true;
      lost.swap(outgoing_);
    }
    for (const Outgoing& each : lost) Settle(each, false);
    for (const std::shared_ptr<Call>& call : Calls()) Cancel(*call);
  }

  void Send(Outgoing message) ABSL_LOCKS_EXCLUDED(mutex_) {
    Enter();
    bool is_lost = false;
    {
      absl::MutexLock lock(&mutex_);
      // The client may use the number again once it has the call's end.
      if (message.ends) calls_.erase(message.call->number());
      is_lost = broken_;
      if (!is_lost) outgoing_.push_back(std::move(message));
    }
    if (is_lost) Settle(message, false);
    Advance();
    Leave();
  }

  // A call's message has been written, or is lost.
  void Settle(const Outgoing& message, bool ok) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (message.call == nullptr) return;
    Call& call = *message.call;
    if (!message.ends) {
      {
        absl::MutexLock lock(&mutex_);
        ++call.callbacks;
      }
      call.user()->OnWriteDone(ok);
    }
    bool done = false;
    {
      absl::MutexLock lock(&mutex_);
      if (message.ends) {
        call.is_sent = true;
      } else {
        --call.callbacks;
      }
      done = call.callbacks == 0 && call.is_sent;
    }
    if (done) End(call);
  }

  void End(Call& call) ABSL_LOCKS_EXCLUDED(mutex_) {
    call.user()->OnDone();
    absl::MutexLock lock(&mutex_);
    --open_;
  }

  const RequestContext* const context_;
  grpc::CallbackServerContext* const call_;
  grpc::ByteBuffer incoming_;  // of the outstanding read, then of its handler
  Outgoing in_flight_;         // of the outstanding write

  absl::Mutex mutex_;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;  // threads
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_written_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  // In progress, by number.
  std::map<uint64_t, std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);
  int64_t open_ ABSL_GUARDED_BY(mutex_) = 0;  // those, and those whose end is being sent
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);  // set: begins no further call
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

ByteStreamReactor* StartSharedCalls(const RequestContext* context,
                                    grpc::CallbackServerContext* call) {
  return new SharedCalls(context, call);
}

}  // namespace ringattn::server
