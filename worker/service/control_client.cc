#include "worker/service/control_client.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/observability/log.h"
#include "common/security/secret.h"
#include "common/wire/durations.h"
#include "common/wire/join_status.h"
#include "common/wire/packed_messages.h"

namespace ringattn::worker {
namespace {

// Keepalive detects a dead coordinator machine. A dead process is detected at once.
constexpr int kKeepaliveTimeMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;
constexpr int kConnectTimeoutMs = 10'000;
constexpr int kResolveAgainMs = 1000;
// Short compared with what a message takes through the coordinator to its client, and long enough
// for several inline operations.
constexpr absl::Duration kHoldTime = absl::Microseconds(500);
// After a coordinator has shut down, it is expected back within this time.
constexpr absl::Duration kRestartTime = absl::Seconds(10);

std::shared_ptr<grpc::Channel> Dial(const ControlClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // gRPC must not back off longer than this class does.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.min_backoff)));
  // Despite its name, this limits how long one connection attempt may take. Short attempts never
  // succeed on a busy machine.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.max_backoff)));
  // A restarted coordinator may have another address. By default gRPC keeps the old one for 30 s.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kResolveAgainMs);
  // Commit carries a blob of every member; Reserve carries the documents of a request.
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return options.security.Dial(options.coordinator, arguments);
}

// The name of the message's oneof member, for logs.
template <typename Message>
std::string KindOf(const Message& message) {
  const auto* field = message.GetDescriptor()->FindFieldByNumber(message.message_case());
  return field == nullptr ? "unknown" : field->name();
}

}  // namespace

ControlClient::ControlClient(ControlClientOptions options)
    : options_(std::move(options)), stub_(v1::WorkerControlService::NewStub(Dial(options_))) {}

ControlClient::~ControlClient() { Stop(); }

void ControlClient::Start(ControlHandler handler) {
  handler_ = std::move(handler);
  loop_ = std::thread([this] { Loop(); });
  heartbeats_ = std::thread([this] { HeartbeatLoop(); });
}

void ControlClient::Leave(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  leaving_ = true;
  end_rest_.Notify();
  if (connected_) outbox_.emplace_back().mutable_leaving();
  mutex_.AwaitWithTimeout(absl::Condition(&left_), timeout);
}

void ControlClient::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  end_rest_.Notify();
  end_heartbeats_.Notify();
  if (loop_.joinable()) loop_.join();
  if (heartbeats_.joinable()) heartbeats_.join();
}

void ControlClient::Send(v1::JoinRequest message) {
  if (LogIsOn(LogLevel::kDebug)) {
    LogDebug("to the coordinator",
             {{"worker", options_.registration.name()}, {"kind", KindOf(message)}});
  }
  const bool answers_inline = message.finished().has_reserved();
  Stream* stream = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (!connected_) return;
    outbox_.push_back(std::move(message));
    if (is_held()) {
      const absl::Time now = MonotonicNow();
      if (now < held_until_) return;
      held_until_ = answers_inline ? now + kHoldTime : absl::InfinitePast();
    }
    if (answers_inline) stream = BeginWrite(&message);
  }
  if (stream != nullptr) FinishWrite(stream, message);
}

void ControlClient::Hold() {
  absl::MutexLock lock(&mutex_);
  held_until_ = MonotonicNow() + kHoldTime;
}

void ControlClient::EndHold() {
  Stream* stream = nullptr;
  v1::JoinRequest message;
  {
    absl::MutexLock lock(&mutex_);
    held_until_ = absl::InfinitePast();
    stream = BeginWrite(&message);
  }
  if (stream != nullptr) FinishWrite(stream, message);
}

ControlClient::Stream* ControlClient::BeginWrite(v1::JoinRequest* message) {
  // The writer takes a registration.
  if (stream_ == nullptr || writing_ || outbox_.empty() || outbox_.front().has_register_()) {
    return nullptr;
  }
  writing_ = true;
  *message = wire::TakePacked(outbox_);
  return stream_;
}

void ControlClient::FinishWrite(Stream* stream, const v1::JoinRequest& message) {
  (void)stream->Write(message);  // the reader sees an error too
  absl::MutexLock lock(&mutex_);
  writing_ = false;
}

void ControlClient::Loop() {
  std::mt19937 random{std::random_device{}()};
  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  absl::Duration backoff = options_.min_backoff;
  absl::Time expected_until = absl::InfinitePast();  // until then the coordinator may be missing
  while (true) {
    const SessionEnd end = RunSession();
    handler_.on_disconnected(end.reason);
    if (end.registered) backoff = options_.min_backoff;
    if (end.replaced) {
      backoff = options_.replaced_backoff;
      LogError("another process registered this worker's name; give each worker its own --name",
               {{"worker", options_.registration.name()}});
    }
    if (end.coordinator_ended) expected_until = MonotonicNow() + kRestartTime;
    const auto log = IsLeaving() || MonotonicNow() < expected_until ? LogInfo : LogWarning;
    log("not connected to the coordinator",
        {{"worker", options_.registration.name()}, {"reason", end.reason}});
    // Workers that lost the same coordinator must not all reconnect at once.
    if (!RestBeforeDialling(backoff * jitter(random))) return;
    backoff = std::min(2 * backoff, options_.max_backoff);
  }
}

bool ControlClient::RestBeforeDialling(absl::Duration duration) {
  end_rest_.WaitFor(duration);
  absl::MutexLock lock(&mutex_);
  left_ = stopping_ || leaving_;
  return !left_;
}

ControlClient::SessionEnd ControlClient::RunSession() {
  SessionEnd end;
  v1::Register registration = options_.registration;
  handler_.complete_registration(&registration);
  grpc::ClientContext context;
  context.AddMetadata(kSecretMetadataKey, options_.secret);
  {
    absl::MutexLock lock(&mutex_);
    // A worker that leaves without a stream does not reconnect: the coordinator would only admit it
    // again.
    if (stopping_ || leaving_) {
      end.reason = "the worker is ending";
      return end;
    }
    context_ = &context;
    connected_ = true;
    outbox_.clear();
    held_until_ = absl::InfinitePast();
    heartbeat_.reset();
    *outbox_.emplace_back().mutable_register_() = std::move(registration);
  }
  std::unique_ptr<Stream> stream = stub_->Join(&context);
  {
    absl::MutexLock lock(&mutex_);
    stream_ = stream.get();
  }
  std::thread writer([this, &stream] { WriteLoop(stream.get()); });
  ReadLoop(stream.get(), &end);
  {
    absl::MutexLock lock(&mutex_);
    connected_ = false;
    stream_ = nullptr;
    heartbeat_interval_ = absl::InfiniteDuration();
  }
  // Ends a write that waits for flow control.
  context.TryCancel();
  writer.join();
  const grpc::Status status = stream->Finish();
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
  end.reason = stopping_ ? "the worker is ending"
                         : absl::StrCat("lost the coordinator: ", status.error_message());
  return end;
}

void ControlClient::ReadLoop(Stream* stream, SessionEnd* end) {
  v1::JoinResponse packed;
  bool goes_on = true;
  while (goes_on && stream->Read(&packed)) {
    const bool are_several = packed.more_size() > 0;
    if (are_several) Hold();
    wire::TakeApart(std::move(packed), [&](v1::JoinResponse message, bool) {
      goes_on = goes_on && Take(std::move(message), end);
    });
    if (are_several) EndHold();
  }
}

bool ControlClient::Take(v1::JoinResponse message, SessionEnd* end) {
  if (LogIsOn(LogLevel::kDebug)) {
    LogDebug("from the coordinator",
             {{"worker", options_.registration.name()}, {"kind", KindOf(message)}});
  }
  switch (message.message_case()) {
    case v1::JoinResponse::kRegistered: {
      end->registered = true;
      handler_.on_registered();
      LogInfo("registered with the coordinator", {{"worker", options_.registration.name()}});
      absl::MutexLock lock(&mutex_);
      heartbeat_interval_ =
          std::max(ToDuration(message.registered().heartbeat_interval()), absl::Milliseconds(10));
      return true;
    }
    case v1::JoinResponse::kLeave:
      if (IsLeaving()) {
        LogInfo("the coordinator has released this worker",
                {{"worker", options_.registration.name()}});
        return false;
      }
      if (message.leave().reason() == kCoordinatorEnds) {
        end->coordinator_ended = true;
        return false;
      }
      LogWarning("the coordinator rejected this worker",
                 {{"worker", options_.registration.name()}, {"reason", message.leave().reason()}});
      end->replaced = message.leave().reason() == kNameJoinedAgain;
      if (message.leave().exit()) handler_.on_leave(message.leave().reason());
      return false;
    default:
      handler_.on_message(std::move(message));
      return true;
  }
}

// Returns once no thread writes to the stream.
void ControlClient::WriteLoop(Stream* stream) {
  v1::JoinRequest message;
  bool ok = true;  // if false, the reader sees the error too
  while (TakeNext(&message)) {
    ok = ok && stream->Write(message);
    absl::MutexLock lock(&mutex_);
    writing_ = false;
  }
}

bool ControlClient::TakeNext(v1::JoinRequest* message) {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !writing_ && (!connected_ || (!outbox_.empty() && !is_held()) || heartbeat_.has_value());
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&has_news));
  if (!connected_) return false;
  writing_ = true;
  if (!outbox_.empty() && outbox_.front().has_register_()) {
    *message =
        std::move(outbox_.front());  // alone, so that the coordinator knows who sends the rest
    outbox_.pop_front();
  } else if (!outbox_.empty()) {
    *message = wire::TakePacked(outbox_);
  } else {
    *message = *std::move(heartbeat_);
    heartbeat_.reset();
  }
  return true;
}

void ControlClient::HeartbeatLoop() {
  const auto active = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopping_ || heartbeat_interval_ < absl::InfiniteDuration();
  };
  while (true) {
    absl::Duration interval;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&active));
      if (stopping_) return;
      interval = heartbeat_interval_;
    }
    v1::JoinRequest message;
    *message.mutable_heartbeat() = handler_.make_heartbeat();
    {
      absl::MutexLock lock(&mutex_);
      if (connected_) heartbeat_ = std::move(message);
    }
    if (end_heartbeats_.WaitFor(interval)) return;
  }
}

bool ControlClient::IsLeaving() {
  absl::MutexLock lock(&mutex_);
  return leaving_;
}

}  // namespace ringattn::worker
