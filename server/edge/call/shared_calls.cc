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
#include "common/wire/message_buffer.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/call_header.h"
#include "server/edge/call/calls_streams.h"
#include "server/edge/call/request_call.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

using wire::CallRequestFrame;
using wire::CallResponseFrame;

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
      absl::StatusOr<wire::FrameReader> frames = wire::FrameReader::Of(incoming_);
      incoming_.Clear();
      if (frames.ok()) {
        absl::MutexLock lock(&mutex_);
        frames_ = *std::move(frames);
      } else {
        RejectStream("message", NoRequest(frames.status()));
      }
    } else {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
      half_closed_ = true;
    }
    Advance();
    Leave();
  }

  void OnWriteDone(bool ok) override {
    Enter();
    const std::vector<Outgoing> written = std::exchange(in_flight_, {});
    in_flight_message_.Clear();
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (!ok) Break();
    for (const Outgoing& each : written) Settle(each, ok);
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
    Call(SharedCalls* stream, CallRequestFrame first) : stream_(stream), first_(std::move(first)) {}

    uint64_t number() const { return first_.call; }

    void SetUser(User* user) override { user_ = user; }
    // After the first message, the client can send nothing for this call.
    void Read(grpc::ByteBuffer* message) override {
      const bool is_first = !std::exchange(has_read_, true);
      if (is_first) message->Swap(&first_.message.get());
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
    wire::MessageBuffer Encode(const grpc::ByteBuffer* message,
                               const std::optional<grpc::Status>& end) const {
      CallResponseFrame frame{.call = number(), .end = end};
      if (message != nullptr) {
        frame.kind = first_.kind;
        frame.message = *message;
      }
      return wire::EncodeCallResponse(frame);
    }

    SharedCalls* const stream_;
    CallRequestFrame first_;
    bool has_read_ = false;
    User* user_ = nullptr;
    std::atomic<bool> cancelled_{false};
  };

  struct Outgoing {
    wire::MessageBuffer message;
    std::shared_ptr<Call> call;
    bool ends = false;  // the call's last
  };

  void Enter() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++inside_;
  }

  void Leave() ABSL_LOCKS_EXCLUDED(mutex_) {
    grpc::Status status;
    {
      absl::MutexLock lock(&mutex_);
      const bool is_idle = !writing_ && outgoing_.empty() && open_ == 0;
      if (--inside_ > 0 || finished_ || !(half_closed_ || ends()) || !is_idle) return;
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

  // Begins calls, and starts the read and the write, as far as they may start.
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_) {
    TakeFrames();
    bool reads = false, writes = false;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      reads = !half_closed_ && !ends() && !reading_ && has_room();
      if (reads) reading_ = true;
      writes = !writing_ && !outgoing_.empty();
      if (writes) {
        writing_ = true;
        in_flight_ = wire::TakeJoined(outgoing_);
      }
    }
    if (writes) {
      std::vector<wire::MessageBuffer> messages;
      for (Outgoing& each : in_flight_) messages.push_back(std::move(each.message));
      in_flight_message_ = wire::JoinMessages(std::move(messages));
      StartWrite(&in_flight_message_.get());
    }
    if (reads) StartRead(&incoming_);
  }

  // Begins the calls of the message that has been read, as far as the stream has room for them. One
  // thread at a time does it. The others need not wait, because it looks again.
  void TakeFrames() ABSL_LOCKS_EXCLUDED(mutex_) {
    bool has_begun = false;
    while (std::optional<wire::FrameReader> frames = NextFrames()) {
      absl::StatusOr<std::optional<CallRequestFrame>> frame = frames->NextRequest();
      if (!frame.ok()) {
        RejectStream("message", NoRequest(frame.status()));
      } else if (frame->has_value()) {
        has_begun |= Take(**std::move(frame));
      }
      absl::MutexLock lock(&mutex_);
      taking_ = false;
      if (frame.ok() && frame->has_value()) {
        frames_ = *std::move(frames);
      } else {
        reading_ = false;
      }
    }
    // All calls of a message arrive before the core handles the first.
    if (has_begun) context_->core->HandleQueued();
  }

  // Returns the frames to take one from; nullopt if there is none, or none may be taken now.
  std::optional<wire::FrameReader> NextFrames() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (taking_ || !frames_.has_value()) return std::nullopt;
    if (ends()) {
      frames_.reset();
      reading_ = false;
      return std::nullopt;
    }
    if (!has_room()) return std::nullopt;
    taking_ = true;
    return std::exchange(frames_, std::nullopt);
  }

  // Returns whether the frame began a call.
  bool Take(CallRequestFrame frame) ABSL_LOCKS_EXCLUDED(mutex_) {
    const uint64_t number = frame.call;
    if (frame.cancels) {
      CancelCall(number);
      return false;
    }
    const std::variant<Caller, grpc::Status> caller = context_->callers->Identify(*call_);
    if (const auto* refused = std::get_if<grpc::Status>(&caller)) {
      EndWith(*refused);  // the client has been removed from the clients file
      return false;
    }
    CallOrigin origin;
    if (frame.timeout.has_value()) origin.deadline = MonotonicNow() + *frame.timeout;
    origin.traceparent = ValidTraceparent(frame.traceparent);
    origin.is_one_of_several = true;
    const Direction direction =
        frame.kind == wire::CarriedKind::kForward ? Direction::kForward : Direction::kBackward;
    auto call = std::make_shared<Call>(this, std::move(frame));
    {
      absl::MutexLock lock(&mutex_);
      if (broken_) return false;
      if (!calls_.emplace(number, call).second) {
        call = nullptr;
      } else {
        ++open_;
      }
    }
    if (call == nullptr) {
      RejectStream("call", absl::StrCat("is ", number, ", a call in progress"));
      return false;
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
    return true;
  }

  static std::string NoRequest(const absl::Status& status) {
    return absl::StrCat("is not a CallsRequest: ", status.message());
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

  // It begins no further call.
  bool ends() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return broken_ || status_.has_value(); }
  bool has_room() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return open_ < context_->limits.max_calls_per_stream;
  }

  const RequestContext* const context_;
  grpc::CallbackServerContext* const call_;
  grpc::ByteBuffer incoming_;        // of the outstanding read
  std::vector<Outgoing> in_flight_;  // of the outstanding write
  wire::MessageBuffer in_flight_message_;

  absl::Mutex mutex_;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;  // threads
  // From the start of a read until the last frame of its message has been taken.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  // The rest of the message; nullopt: none, or a thread is taking a frame from it.
  std::optional<wire::FrameReader> frames_ ABSL_GUARDED_BY(mutex_);
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
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
