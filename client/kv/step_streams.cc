#include "client/kv/step_streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/kv/grpc_deadline.h"
#include "client/transfer/grpc_status.h"
#include "common/base/monotonic_time.h"
#include "common/wire/durations.h"

namespace ringattn::client {
namespace {

constexpr absl::Duration kInterruptInterval = absl::Milliseconds(50);
// Between two looks at the streams while a ring is silent.
constexpr absl::Duration kRingInterval = absl::Milliseconds(10);
// The streams are looked at this often while the rings answer: gRPC has work of its own.
constexpr absl::Duration kStreamInterval = absl::Seconds(1);
// A response without its tensors, and one refusal of a row or command.
constexpr int64_t kResponseBytes = 512;
constexpr int64_t kRefusalBytes = 512;

bool IsInterrupted(const StepStreams::Limits& limits) {
  return limits.interrupted != nullptr && *limits.interrupted && (*limits.interrupted)();
}

// A refused StepBegin is the only answer to it and to the call that was sent with it.
bool IsComplete(const std::vector<v1::StepResponse>& answers, size_t count) {
  return answers.size() == count || (!answers.empty() && answers.front().has_refused());
}

}  // namespace

bool IsVerdict(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kUnauthenticated:  // an outdated token: fenced, or the peer restarted
      return false;
    case absl::StatusCode::kInternal:
      return !DetailsOf(status).reason.empty();
    default:
      return true;
  }
}

StepStreams::StepStreams(std::vector<StepStream::Peer> peers, std::shared_ptr<BearerToken> token,
                         std::shared_ptr<StepRings> rings)
    : peers_(std::move(peers)), token_(std::move(token)), rings_(std::move(rings)) {}

StepStreams::~StepStreams() {
  Close();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

absl::StatusOr<std::vector<v1::StepOpened>> StepStreams::Open(const Limits& limits) {
  if (rings_ != nullptr && rings_->region_id().empty()) {
    return absl::UnavailableError("the region of the step rings is not attached to any worker");
  }
  for (size_t i = 0; i < peers_.size(); ++i) {
    StepStream::Peer peer = peers_[i];
    if (rings_ != nullptr) *peer.hello.mutable_ring() = rings_->Start(i);
    streams_.push_back(
        std::make_unique<StepStream>(peer, peer.is_worker ? nullptr : token_.get(), &queue_));
  }
  auto answers = Await(1, limits);
  if (!answers.ok()) return answers.status();
  std::vector<v1::StepOpened> opened;
  for (size_t i = 0; i < peers_.size(); ++i) {
    v1::StepResponse& answer = (*answers)[i].front();
    if (!answer.has_opened()) {
      Close();
      return MakeErrorWithReason(
          absl::StatusCode::kInternal,
          absl::StrCat(peers_[i].name, " answered StepHello with another message"), "BAD_ANSWER");
    }
    if (rings_ != nullptr) rings_->active_wait().SetSpin(ToDuration(answer.opened().ring_spin()));
    opened.push_back(std::move(*answer.mutable_opened()));
  }
  return opened;
}

absl::StatusOr<std::vector<std::vector<v1::StepResponse>>> StepStreams::Exchange(
    const Requests& requests, int64_t result_bytes, const Limits& limits) {
  if (FitRings(requests, result_bytes)) return ExchangeInRings(requests, limits);
  const size_t count = requests.front().size();
  for (size_t i = 0; i < streams_.size(); ++i) {
    for (const v1::StepRequest* request : requests[i]) streams_[i]->Send(*request);
  }
  return Await(count, limits);
}

bool StepStreams::FitRings(const Requests& requests, int64_t result_bytes) const {
  if (rings_ == nullptr) return false;
  return std::all_of(requests.begin(), requests.end(), [&](const auto& of_peer) {
    int64_t refusals = 0;
    for (const v1::StepRequest* request : of_peer) {
      refusals += request->begin().rows_size() + request->begin().commands_size();
    }
    return rings_->Fits(of_peer, kResponseBytes + std::max(result_bytes, refusals * kRefusalBytes));
  });
}

absl::StatusOr<StepStreams::Answers> StepStreams::ExchangeInRings(const Requests& requests,
                                                                  const Limits& limits) {
  for (size_t i = 0; i < streams_.size(); ++i) rings_->Send(i, requests[i]);
  Answers answers(streams_.size());
  absl::Status status = AwaitRings(requests.front().size(), limits, &answers);
  if (status.ok()) {
    if (MonotonicNow() - polled_ > kStreamInterval) PollStreams();
    return answers;
  }
  Close();
  return status;
}

absl::Status StepStreams::AwaitRings(size_t count, const Limits& limits, Answers* answers) {
  absl::Time interrupted = MonotonicNow();
  std::vector<size_t> missing(streams_.size(), count);
  std::vector<size_t> waiting;  // peers whose answers are missing
  while (true) {
    waiting.clear();
    for (size_t peer = 0; peer < streams_.size(); ++peer) {
      absl::Status status = TakeFromRing(peer, &missing[peer], &(*answers)[peer]);
      if (!status.ok()) return status;
      if (missing[peer] > 0) waiting.push_back(peer);
    }
    if (waiting.empty()) break;
    if (rings_->Wait(waiting, kRingInterval)) continue;
    PollStreams();
    if (absl::Status ended = EndOfStreams(*answers, count); !ended.ok()) return ended;
    for (const size_t peer : waiting) {
      // A refused description is the last answer of a stream that ends.
      if (IsComplete((*answers)[peer], count) && streams_[peer]->end().has_value()) {
        missing[peer] = 0;
      }
    }
    const absl::Time now = MonotonicNow();
    if (now >= limits.deadline) {
      return absl::DeadlineExceededError("the deadline of the call has passed");
    }
    if (now - interrupted < kInterruptInterval) continue;
    interrupted = now;
    if (IsInterrupted(limits)) return absl::CancelledError("the call was interrupted");
  }
  for (size_t peer = 0; peer < streams_.size(); ++peer) {
    if (IsComplete((*answers)[peer], count)) continue;
    return MakeErrorWithReason(absl::StatusCode::kInternal,
                               absl::StrCat(peers_[peer].name, " left a request unanswered"),
                               "BAD_ANSWER");
  }
  return absl::OkStatus();
}

absl::Status StepStreams::TakeFromRing(size_t peer, size_t* missing,
                                       std::vector<v1::StepResponse>* answers) {
  while (*missing > 0) {
    v1::StepResponse answer;
    const absl::StatusOr<bool> taken = rings_->Take(peer, &answer);
    if (!taken.ok()) {
      return WithMessage(taken.status(),
                         absl::StrCat(peers_[peer].name, ": ", taken.status().message()));
    }
    if (!*taken) break;
    --*missing;
    if (answer.has_result()) {
      rings_->active_wait().NoteDeviceTime(ToDuration(answer.result().device_time()));
    }
    // An empty answer: the request followed a refused description.
    if (answer.message_case() != v1::StepResponse::MESSAGE_NOT_SET) {
      answers->push_back(std::move(answer));
    }
  }
  return absl::OkStatus();
}

void StepStreams::PollStreams() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.AsyncNext(&tag, &ok, GrpcDeadlineIn(absl::ZeroDuration())) ==
         grpc::CompletionQueue::GOT_EVENT) {
    StepStream::Handle(tag, ok);
  }
  polled_ = MonotonicNow();
}

absl::StatusOr<std::vector<std::vector<v1::StepResponse>>> StepStreams::Await(
    size_t count, const Limits& limits) {
  std::vector<std::vector<v1::StepResponse>> answers(streams_.size());
  absl::Status status;
  while (true) {
    bool complete = true;
    for (size_t i = 0; i < streams_.size(); ++i) {
      while (!IsComplete(answers[i], count) && streams_[i]->has_answer()) {
        answers[i].push_back(streams_[i]->TakeAnswer());
      }
      complete = complete && IsComplete(answers[i], count);
    }
    if (complete) return answers;
    status = EndOfStreams(answers, count);
    if (!status.ok()) break;
    const absl::Duration slice = std::min(kInterruptInterval, limits.deadline - MonotonicNow());
    void* tag = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, GrpcDeadlineIn(slice)) == grpc::CompletionQueue::GOT_EVENT) {
      StepStream::Handle(tag, ok);
      continue;
    }
    if (IsInterrupted(limits)) {
      status = absl::CancelledError("the call was interrupted");
      break;
    }
    if (MonotonicNow() >= limits.deadline) {
      status = absl::DeadlineExceededError("the deadline of the call has passed");
      break;
    }
  }
  Close();
  return status;
}

absl::Status StepStreams::EndOfStreams(const std::vector<std::vector<v1::StepResponse>>& answers,
                                       size_t count) const {
  absl::Status first;
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (!streams_[i]->end().has_value() || IsComplete(answers[i], count)) continue;
    absl::Status status = FromGrpcStatus(*streams_[i]->end());
    if (status.ok()) status = absl::UnavailableError("the stream ended");
    status = WithMessage(status, absl::StrCat(peers_[i].name, ": ", status.message()));
    if (IsVerdict(status)) return status;
    if (first.ok()) first = std::move(status);
  }
  return first;
}

void StepStreams::Close() {
  for (const auto& stream : streams_) stream->Cancel();
  for (const auto& stream : streams_) {
    while (stream->pending() > 0) {
      void* tag = nullptr;
      bool ok = false;
      if (!queue_.Next(&tag, &ok)) break;
      StepStream::Handle(tag, ok);
    }
  }
  streams_.clear();
}

}  // namespace ringattn::client
