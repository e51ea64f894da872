#include "server/core/requests.h"

#include <algorithm>
#include <cassert>

#include "server/core/client_failures.h"

namespace ringattn::server {
namespace {

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

int64_t InputBytes(const RequestArrived& request) {
  std::vector<TensorId> inputs = {TensorId::kQ, TensorId::kK, TensorId::kV};
  if (request.direction == Direction::kBackward) {
    inputs.push_back(TensorId::kDout);
    if (!request.recompute_forward) {
      inputs.push_back(TensorId::kOut);
      inputs.push_back(TensorId::kLse);
    }
  }
  int64_t bytes = 0;
  for (TensorId id : inputs) bytes += LayoutOf(request.spec, id).bytes();
  return bytes;
}

Request& Requests::Add(const RequestArrived& arrived) {
  assert(requests_.count(arrived.stream) == 0 && stream_by_id_.count(arrived.request_id) == 0);
  Request& request = requests_[arrived.stream];
  request.arrived = arrived;
  request.arrived_at = turn_.now();
  request.bytes = InputBytes(arrived);
  stream_by_id_[arrived.request_id] = arrived.stream;
  SetState(request, v1::OPERATION_STATE_QUEUED);
  return request;
}

void Requests::SetState(Request& request, v1::OperationState state) {
  if (request.state == state) return;
  request.state = state;
  turn_.Emit(StateChanged{request.stream(), state});
}

void Requests::Succeed(Request& request) {
  SetState(request, v1::OPERATION_STATE_SUCCEEDED);
  turn_.Emit(FinishRequest{request.stream(), turn_.now() - request.download_at});
  Forget(request, std::nullopt);
}

void Requests::Fail(Request& request, const Failure& failure) {
  SetState(request, v1::OPERATION_STATE_FAILED);
  turn_.Emit(FailRequest{request.stream(), failure});
  Forget(request, failure);
}

void Requests::Refuse(StreamId stream, const Failure& failure) {
  turn_.Emit(StateChanged{stream, v1::OPERATION_STATE_FAILED});
  turn_.Emit(FailRequest{stream, failure});
}

void Requests::Forget(const Request& request, const std::optional<Failure>& failure) {
  OperationView view = ViewOf(request);
  view.failure = failure;
  finished_.push_back(std::move(view));
  while (static_cast<int64_t>(finished_.size()) > config_.limits.finished_operations_kept) {
    finished_.pop_front();
  }
  stream_by_id_.erase(request.arrived.request_id);
  requests_.erase(StreamId{request.stream()});
}

std::vector<std::pair<StreamId, Failure>> Requests::CheckTimers(
    std::optional<absl::Time> ringless_since) const {
  std::vector<std::pair<StreamId, Failure>> ended;
  for (const auto& [stream, request] : requests_) {
    if (request.arrived.deadline <= turn_.now()) {
      ended.emplace_back(stream, DeadlineExceeded(StateWord(request.state)));
    } else if (ringless_since && request.state == v1::OPERATION_STATE_QUEUED &&
               turn_.now() - std::max(request.arrived_at, *ringless_since) >
                   config_.ring_wait_max) {
      ended.emplace_back(stream, NoRing(config_.retry_after));
    }
  }
  return ended;
}

Request* Requests::Find(StreamId stream) {
  const auto found = requests_.find(stream);
  return found == requests_.end() ? nullptr : &found->second;
}

const Request* Requests::FindById(const std::string& request_id) const {
  const auto found = stream_by_id_.find(request_id);
  return found == stream_by_id_.end() ? nullptr : &requests_.at(found->second);
}

std::optional<OperationView> Requests::FindView(const std::string& request_id) const {
  if (const Request* request = FindById(request_id)) return ViewOf(*request);
  const auto ended =
      std::find_if(finished_.rbegin(), finished_.rend(),
                   [&](const OperationView& view) { return view.request_id == request_id; });
  if (ended == finished_.rend()) return std::nullopt;
  return *ended;
}

OperationView Requests::ViewOf(const Request& request) const {
  OperationView view;
  view.request_id = request.arrived.request_id;
  view.state = request.state;
  view.generation = request.generation;
  view.plan = request.plan;
  view.members = request.member_names;
  return view;
}

}  // namespace ringattn::server
