// The client's side of a request: exactly one FinishRequest or FailRequest ends it.
#include <algorithm>

#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {
namespace {

int64_t InputBytes(const RequestArrived& request) {
  int64_t bytes = 0;
  for (TensorId id : InputsOf(request.spec, request.direction, request.recompute_forward)) {
    bytes += BytesOf(request.spec, id);
  }
  return bytes;
}

const char* StateWord(v1::OperationState state) {
  switch (state) {
    case v1::OPERATION_STATE_UPLOADING:
      return "uploading";
    case v1::OPERATION_STATE_COMPUTING:
      return "computing";
    case v1::OPERATION_STATE_DOWNLOADING:
      return "downloading";
    default:
      return "queued";
  }
}

}  // namespace

void Coordinator::Impl::On(const RequestArrived& event) {
  if (requests_.count(event.stream) > 0) return;
  if (draining_) return FailStream(event.stream, Draining(config_.retry_after));

  const auto older = stream_by_request_id_.find(event.request_id);
  if (older != stream_by_request_id_.end()) {
    if (requests_.at(older->second).arrived.fingerprint != event.fingerprint) {
      return FailStream(event.stream, RequestIdReused(event.request_id));
    }
    EndRequest(older->second, Superseded(event.request_id));
  }
  if (event.deadline <= now_) return FailStream(event.stream, DeadlineExceeded("arriving"));
  if (workers_.empty()) return FailStream(event.stream, NoRing(config_.retry_after));

  // One request always fits: its own size is the edge's to judge.
  const int64_t bytes = InputBytes(event);
  const Limits& limits = config_.limits;
  const int64_t waiting = queue_.size();
  if (waiting >= limits.max_queued_requests ||
      (waiting > 0 && queued_bytes_ > limits.max_queued_bytes - bytes)) {
    return FailStream(event.stream, QueueFull(waiting, queued_bytes_, limits.max_queued_requests,
                                              limits.max_queued_bytes, config_.retry_after));
  }

  RequestRecord& request = requests_[event.stream];
  request.arrived = event;
  request.arrived_at = now_;
  request.bytes = bytes;
  stream_by_request_id_[event.request_id] = event.stream;
  queue_.push_back(event.stream);
  queued_bytes_ += bytes;
  SetState(request, v1::OPERATION_STATE_QUEUED);
  // A request that can never be planned learns so at once, not behind the queue.
  if (ring_.phase == RingPhase::kReady) EnsurePlanned(request);
}

void Coordinator::Impl::On(const RequestEnded& event) { EndRequest(event.stream, event.why); }

void Coordinator::Impl::On(const CancelRequested& event) {
  const auto found = stream_by_request_id_.find(event.request_id);
  if (found != stream_by_request_id_.end()) EndRequest(found->second, CancelledByCall());
}

void Coordinator::Impl::On(const UploadProgressed& event) {
  OperationRecord* operation = OperationOf(event.stream);
  if (operation == nullptr || operation->phase != OperationRecord::Phase::kUploading) return;
  operation->last_advance = now_;
}

void Coordinator::Impl::On(const DownloadProgressed& event) {
  OperationRecord* operation = OperationOf(event.stream);
  if (operation == nullptr || operation->phase != OperationRecord::Phase::kDownloading) return;
  operation->last_advance = now_;
}

void Coordinator::Impl::On(const MembersStandStill& event) {
  OperationRecord* operation = OperationOf(event.stream);
  if (operation == nullptr) return;
  for (size_t rank = 0; rank < operation->members.size(); ++rank) {
    std::optional<absl::Time>& since = operation->members[rank].stands_since;
    const bool named = std::find(event.members.begin(), event.members.end(),
                                 static_cast<int>(rank)) != event.members.end();
    since = named ? since.value_or(now_) : std::optional<absl::Time>();
  }
}

void Coordinator::Impl::On(const DownloadFinished& event) {
  OperationRecord* operation = OperationOf(event.stream);
  if (operation == nullptr || operation->phase != OperationRecord::Phase::kDownloading) return;
  RequestRecord& request = requests_.at(event.stream);
  SetState(request, v1::OPERATION_STATE_SUCCEEDED);
  Emit(FinishRequest{event.stream, now_ - request.download_at});
  Forget(event.stream, std::nullopt);
  operation->stream.reset();
  CloseOperation(*operation);
}

void Coordinator::Impl::On(const ShardStreamFailed& event) {
  OperationRecord* operation = OperationOf(event.stream);
  if (operation == nullptr || operation->pending_failure || event.member < 0 ||
      event.member >= static_cast<int>(operation->members.size())) {
    return;
  }
  const ConnectionId connection = operation->members[event.member].connection;
  operation->pending_failure =
      ShardStreamBroken(*RankOf(connection), NameOf(connection), event.reason, config_.retry_after);
  operation->pending_failure_due = now_ + config_.blame_window;
}

RequestRecord* Coordinator::Impl::FindRequest(StreamId stream) {
  const auto found = requests_.find(stream);
  return found == requests_.end() ? nullptr : &found->second;
}

OperationRecord* Coordinator::Impl::OperationOf(StreamId stream) {
  const RequestRecord* request = FindRequest(stream);
  if (request == nullptr) return nullptr;
  const auto found = operations_.find(request->operation_id);
  return found == operations_.end() ? nullptr : &found->second;
}

void Coordinator::Impl::SetState(RequestRecord& request, v1::OperationState state) {
  if (request.state == state) return;
  request.state = state;
  Emit(StateChanged{request.arrived.stream, state});
}

// For a stream that never became a request.
void Coordinator::Impl::FailStream(StreamId stream, const Failure& failure) {
  Emit(StateChanged{stream, v1::OPERATION_STATE_FAILED});
  Emit(FailRequest{stream, failure});
}

void Coordinator::Impl::EndRequest(StreamId stream, const Failure& failure) {
  RequestRecord* request = FindRequest(stream);
  if (request == nullptr) return;
  OperationRecord* operation = OperationOf(stream);
  SetState(*request, v1::OPERATION_STATE_FAILED);
  Emit(FailRequest{stream, failure});
  Forget(stream, failure);
  if (operation == nullptr) return;
  operation->stream.reset();
  CloseOperation(*operation);
}

void Coordinator::Impl::Forget(StreamId stream, const std::optional<Failure>& failure) {
  RequestRecord& request = requests_.at(stream);
  LeaveQueue(stream);
  OperationView view = ViewOf(request);
  view.failure = failure;
  finished_.push_back(std::move(view));
  while (static_cast<int64_t>(finished_.size()) > config_.limits.finished_operations_kept) {
    finished_.pop_front();
  }
  stream_by_request_id_.erase(request.arrived.request_id);
  requests_.erase(stream);
}

void Coordinator::Impl::LeaveQueue(StreamId stream) {
  const auto queued = std::find(queue_.begin(), queue_.end(), stream);
  if (queued == queue_.end()) return;
  queue_.erase(queued);
  queued_bytes_ -= requests_.at(stream).bytes;
}

void Coordinator::Impl::CheckRequestTimers() {
  std::vector<std::pair<StreamId, Failure>> ended;
  for (const auto& [stream, request] : requests_) {
    const absl::Time ringless_since = std::max(request.arrived_at, ringless_since_);
    if (request.arrived.deadline <= now_) {
      ended.emplace_back(stream, DeadlineExceeded(StateWord(request.state)));
    } else if (request.state == v1::OPERATION_STATE_QUEUED && ring_.phase != RingPhase::kReady &&
               now_ - ringless_since > config_.ring_wait_max) {
      ended.emplace_back(stream, NoRing(config_.retry_after));
    }
  }
  for (const auto& [stream, failure] : ended) EndRequest(stream, failure);
}

}  // namespace ringattn::server
