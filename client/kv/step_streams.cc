#include "client/kv/step_streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/api/error.h"
#include "client/transfer/grpc_status.h"

namespace ringattn::client {
namespace {

constexpr absl::Duration kInterruptInterval = absl::Milliseconds(50);

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

StepStreams::StepStreams(std::vector<StepStream::Peer> peers, std::shared_ptr<BearerToken> token)
    : peers_(std::move(peers)), token_(std::move(token)) {}

StepStreams::~StepStreams() {
  Close();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

absl::StatusOr<std::vector<v1::StepOpened>> StepStreams::Open(const Limits& limits) {
  for (const StepStream::Peer& peer : peers_) {
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
    opened.push_back(std::move(*answer.mutable_opened()));
  }
  return opened;
}

absl::StatusOr<std::vector<std::vector<v1::StepResponse>>> StepStreams::Exchange(
    std::vector<std::vector<v1::StepRequest>> requests, const Limits& limits) {
  const size_t count = requests.front().size();
  for (size_t i = 0; i < streams_.size(); ++i) {
    for (v1::StepRequest& request : requests[i]) streams_[i]->Send(std::move(request));
  }
  return Await(count, limits);
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
    const absl::Time slice = absl::Now() + kInterruptInterval;
    void* tag = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(std::min(slice, limits.deadline))) ==
        grpc::CompletionQueue::GOT_EVENT) {
      StepStream::Handle(tag, ok);
      continue;
    }
    if (IsInterrupted(limits)) {
      status = absl::CancelledError("the call was interrupted");
      break;
    }
    if (absl::Now() >= limits.deadline) {
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
