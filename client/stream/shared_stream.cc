#include "client/stream/shared_stream.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {
namespace {

constexpr char kCallsMethod[] = "/ringattn.v1.AttentionService/Calls";
// Between looks at deadlines.
constexpr std::chrono::milliseconds kTimerInterval{100};

std::optional<absl::Duration> TimeoutOf(std::chrono::system_clock::time_point deadline) {
  if (deadline == std::chrono::system_clock::time_point::max()) return std::nullopt;
  return ToMonotonic(absl::FromChrono(deadline)) - MonotonicNow();
}

wire::CarriedKind CarriedKindOf(CallKind kind) {
  return kind == CallKind::kForward ? wire::CarriedKind::kForward : wire::CarriedKind::kBackward;
}

}  // namespace

// All but the constants is guarded by the stream's lock.
struct SharedStream::Call {
  CallStreamOptions options;
  CallStream::User* user = nullptr;
  uint64_t number = 0;          // 0: not begun
  wire::MessageBuffer message;  // the call's first
  grpc::ByteBuffer* read = nullptr;
  std::deque<wire::MessageBuffer> received;
  bool write_ended = false, write_ok = false, write_reported = false;
  std::optional<absl::Time> cancelled_at;  // monotonic
  std::optional<grpc::Status> end;
  bool pumping = false;  // a thread calls the user back until there is no reason left
};

// The stream of one call, owned by its user.
class SharedStream::Handle final : public CallStream {
 public:
  Handle(std::shared_ptr<SharedStream> stream, std::shared_ptr<Call> call)
      : stream_(std::move(stream)), call_(std::move(call)) {}
  ~Handle() override {
    absl::MutexLock lock(&stream_->mutex_);
    const bool has_ended = call_->number > 0 || call_->end.has_value();  // or will end
    if (!has_ended) --stream_->open_;
  }

  // The user may destroy this while another thread calls it back, so the stream and the call are
  // copied.
  void Start() override {
    const std::shared_ptr<SharedStream> stream = stream_;
    stream->Begin(call_);
  }
  void Read(grpc::ByteBuffer* message) override {
    const std::shared_ptr<SharedStream> stream = stream_;
    const std::shared_ptr<Call> call = call_;
    {
      absl::MutexLock lock(&stream->mutex_);
      call->read = message;
    }
    stream->Pump(call);
  }
  void Write(const grpc::ByteBuffer* message) override { WriteLast(message); }
  void WriteLast(const grpc::ByteBuffer* message) override {
    {
      absl::MutexLock lock(&stream_->mutex_);
      if (call_->number == 0) {
        call_->message = *message;
        return;
      }
    }
    TryCancel();  // no second message can follow
  }
  void WritesDone() override {}
  void TryCancel() override {
    const std::shared_ptr<SharedStream> stream = stream_;
    stream->Cancel(call_);
  }

 private:
  const std::shared_ptr<SharedStream> stream_;
  const std::shared_ptr<Call> call_;
};

SharedStream::SharedStream(CallSharer* sharer, const std::string& token)
    : sharer_(sharer),
      options_(sharer->options_),
      stub_(std::in_place, sharer->channel_),
      context_(std::in_place),
      used_at_(MonotonicNow()) {
  context_->set_initial_metadata_corked(true);  // the first request is written at once
  if (!token.empty()) {
    context_->AddMetadata(kAuthorizationKey, absl::StrCat(kBearerPrefix, token));
  }
}

SharedStream::~SharedStream() {
  // The last reference to the channel must not be dropped here (client/call/attempt.cc).
  context_.reset();
  stub_.reset();
  sharer_->Released();
}

void SharedStream::Open() {
  self_ = shared_from_this();
  stub_->PrepareBidiStreamingCall(&*context_, kCallsMethod, {}, this);
  AddHold();  // writes start on the threads of users
  StartRead(&incoming_);
  StartCall();
  SetTimer();
}

std::unique_ptr<CallStream> SharedStream::Add(const CallStreamOptions& options,
                                              CallStream::User* user, uint32_t max_calls) {
  auto call = std::make_shared<Call>();
  call->options = options;
  call->user = user;
  {
    absl::MutexLock lock(&mutex_);
    if (is_over() || open_ >= max_calls) return nullptr;
    ++open_;
    used_at_ = MonotonicNow();
  }
  return std::make_unique<Handle>(shared_from_this(), std::move(call));
}

bool SharedStream::IsOver() {
  absl::MutexLock lock(&mutex_);
  return is_over();
}

void SharedStream::Close() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  Advance();
}

void SharedStream::Abandon() {
  absl::MutexLock lock(&mutex_);
  closing_ = true;
  if (context_.has_value()) context_->TryCancel();
}

void SharedStream::Begin(std::shared_ptr<Call> call) {
  std::optional<grpc::Status> refused;
  {
    absl::MutexLock lock(&mutex_);
    if (call->cancelled_at.has_value()) {
      refused = grpc::Status(grpc::StatusCode::CANCELLED, "cancelled by the caller");
    } else if (is_over()) {
      refused = grpc::Status(grpc::StatusCode::UNAVAILABLE, "the Calls stream has ended");
    } else {
      call->number = ++last_call_;
      calls_[call->number] = call;
      used_at_ = MonotonicNow();
      outgoing_.push_back({wire::EncodeCallRequest({.call = call->number,
                                                    .timeout = TimeoutOf(call->options.deadline),
                                                    .traceparent = call->options.traceparent,
                                                    .kind = CarriedKindOf(call->options.kind),
                                                    .message = std::move(call->message)}),
                           call});
    }
  }
  if (refused.has_value()) return EndCall(call, *refused);
  Advance();
}

void SharedStream::Cancel(std::shared_ptr<Call> call) {
  {
    absl::MutexLock lock(&mutex_);
    if (call->cancelled_at.has_value()) return;
    call->cancelled_at = MonotonicNow();
    if (call->end.has_value()) {
      call->received.clear();  // the user is being called back, and reads no further
      return;
    }
    if (call->number == 0) return;  // Begin ends it
    outgoing_.push_back(
        {wire::EncodeCallRequest({.call = call->number, .cancels = true}), nullptr});
  }
  Advance();
}

void SharedStream::OnReadDone(bool ok) {
  if (ok) {
    has_answered_ = true;
    TakeMessage();
    return StartRead(&incoming_);
  }
  bool releases = false;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    releases = TakeHold();
  }
  if (releases) RemoveHold();
}

void SharedStream::TakeMessage() {
  absl::StatusOr<wire::FrameReader> frames = wire::FrameReader::Of(incoming_);
  incoming_.Clear();
  absl::Status status = frames.status();
  {
    absl::MutexLock lock(&mutex_);
    taking_ = true;
  }
  while (status.ok()) {
    absl::StatusOr<std::optional<wire::CallResponseFrame>> frame = frames->NextResponse();
    status = frame.status();
    if (!frame.ok() || !frame->has_value()) break;
    TakeResponse(**std::move(frame));
  }
  {
    absl::MutexLock lock(&mutex_);
    taking_ = false;
    if (!status.ok()) {
      broken_ = grpc::Status(grpc::StatusCode::INTERNAL,
                             absl::StrCat("the server sent no CallsResponse: ", status.message()));
      context_->TryCancel();
    }
  }
  Advance();
}

void SharedStream::TakeResponse(wire::CallResponseFrame frame) {
  std::shared_ptr<Call> call;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = calls_.find(frame.call);
    if (found == calls_.end()) return;  // it has ended here
    call = found->second;
    if (frame.kind.has_value()) call->received.push_back(std::move(frame.message));
  }
  if (frame.end.has_value()) return EndCall(call, *frame.end);
  Pump(call);
}

void SharedStream::OnWriteDone(bool ok) {
  in_flight_.Clear();
  std::vector<std::shared_ptr<Call>> calls;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    calls.swap(writing_calls_);
    for (const std::shared_ptr<Call>& call : calls) {
      call->write_ended = true;
      call->write_ok = ok;
    }
  }
  for (const std::shared_ptr<Call>& call : calls) Pump(call);
  if (ok) Advance();
}

void SharedStream::OnWritesDoneDone(bool) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
}

void SharedStream::Advance() {
  std::vector<wire::MessageBuffer> messages;
  bool half_closes = false;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || writing_ || writes_done_ || taking_) return;
    if (!outgoing_.empty()) {
      for (Outgoing& each : wire::TakeJoined(outgoing_)) {
        messages.push_back(std::move(each.message));
        if (each.call != nullptr) writing_calls_.push_back(std::move(each.call));
      }
    } else if (closing_ && calls_.empty()) {
      half_closes = writes_done_ = true;
    } else {
      return;
    }
    writing_ = true;
    ++starting_;
  }
  if (!messages.empty()) {
    in_flight_ = wire::JoinMessages(std::move(messages));
    StartWrite(&in_flight_.get());
  }
  if (half_closes) StartWritesDone();
  bool releases = false;
  {
    absl::MutexLock lock(&mutex_);
    --starting_;
    releases = TakeHold();
  }
  if (releases) RemoveHold();
}

bool SharedStream::TakeHold() {
  if (!has_hold_ || !ended_ || starting_ > 0) return false;
  has_hold_ = false;
  return true;
}

void SharedStream::EndCall(std::shared_ptr<Call> call, const grpc::Status& status) {
  const std::shared_ptr<SharedStream> self = shared_from_this();  // the user may own the last one
  bool is_last = false;
  {
    absl::MutexLock lock(&mutex_);
    if (call->end.has_value()) return;
    call->end = status;
    --open_;
    // A message that has not left never will. One that is being written stays in in_flight_, so the
    // user need not wait for a server that does not read.
    call->write_ended = true;
    for (auto each = outgoing_.begin(); each != outgoing_.end(); ++each) {
      if (each->call != call) continue;
      outgoing_.erase(each);
      break;
    }
    if (call->cancelled_at.has_value()) call->received.clear();
    calls_.erase(call->number);
    is_last = closing_ && calls_.empty();
  }
  Pump(call);
  if (is_last) Advance();
}

void SharedStream::Pump(std::shared_ptr<Call> call) {
  enum class Next { kWriteDone, kMessage, kNoMessage, kDone };
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(call->pumping, true)) return;
  }
  while (true) {
    Next next = Next::kDone;
    bool write_ok = false;
    {
      absl::MutexLock lock(&mutex_);
      write_ok = call->write_ok;
      if (call->write_ended && !call->write_reported) {
        call->write_reported = true;
        next = Next::kWriteDone;
      } else if (call->read != nullptr && !call->received.empty()) {
        call->read->Swap(&call->received.front().get());
        call->received.pop_front();
        call->read = nullptr;
        next = Next::kMessage;
      } else if (call->read != nullptr && call->end.has_value()) {
        call->read = nullptr;
        next = Next::kNoMessage;
      } else if (call->end.has_value() && call->write_ended && call->received.empty()) {
        // Stays `pumping`, because nothing follows.
      } else {
        call->pumping = false;
        return;
      }
    }
    switch (next) {
      case Next::kWriteDone:
        call->user->OnWriteDone(write_ok);
        break;
      case Next::kMessage:
        call->user->OnReadDone(true);
        break;
      case Next::kNoMessage:
        call->user->OnReadDone(false);
        break;
      case Next::kDone:
        return call->user->OnDone(*call->end);
    }
  }
}

void SharedStream::OnDone(const grpc::Status& status) {
  grpc::Status end = status;
  std::vector<std::shared_ptr<Call>> calls;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    for (const auto& [number, call] : calls_) calls.push_back(call);
    if (broken_.has_value()) end = *broken_;
    if (timer_.has_value()) timer_->Cancel();
  }
  const bool lacks_calls = status.error_code() == grpc::StatusCode::UNIMPLEMENTED;
  const bool refused = lacks_calls || status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  if (refused && !has_answered_) sharer_->Refused(lacks_calls);
  if (end.ok() || refused) {
    // A replay takes a separate RPC.
    end = grpc::Status(grpc::StatusCode::UNAVAILABLE,
                       absl::StrCat("the server ended the Calls stream", status.ok() ? "" : ": ",
                                    status.error_message()));
  }
  for (const std::shared_ptr<Call>& call : calls) EndCall(call, end);
  const std::shared_ptr<SharedStream> self = std::move(self_);
}

void SharedStream::SetTimer() {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  timer_.emplace();
  timer_->Set(std::chrono::system_clock::now() + kTimerInterval,
              [weak = weak_from_this()](bool ok) {
                // The alarm keeps this function, so it must not own the stream.
                if (const std::shared_ptr<SharedStream> self = weak.lock()) self->OnTimer(ok);
              });
}

void SharedStream::OnTimer(bool ok) {
  if (!ok) return;
  std::vector<std::pair<std::shared_ptr<Call>, grpc::Status>> late;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = MonotonicNow();
    const auto wall = std::chrono::system_clock::now();
    for (const auto& [number, call] : calls_) {
      const auto& deadline = call->options.deadline;
      if (call->cancelled_at.has_value()) {
        if (now < *call->cancelled_at + options_.cancel_grace) continue;
        late.push_back({call, {grpc::StatusCode::CANCELLED, "cancelled by the caller"}});
      } else if (deadline != std::chrono::system_clock::time_point::max() &&
                 wall > deadline + absl::ToChronoMilliseconds(options_.grace)) {
        late.push_back({call, {grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"}});
      }
    }
    if (calls_.empty() && now > used_at_ + options_.idle) closing_ = true;
  }
  for (const auto& [call, status] : late) {
    Cancel(call);
    EndCall(call, status);
  }
  Advance();
  SetTimer();
}

}  // namespace ringattn::client
