#include "server/core/requests/requests.h"

#include <algorithm>
#include <cassert>

#include "common/attention/tensors.h"
#include "common/base/many_documents.h"
#include "common/layout/dilation.h"
#include "server/core/requests/client_failures.h"
#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

const char* StateWord(v1::RequestState state) {
  switch (state) {
    case v1::REQUEST_STATE_UPLOADING:
      return "uploading";
    case v1::REQUEST_STATE_COMPUTING:
      return "computing";
    case v1::REQUEST_STATE_DOWNLOADING:
      return "downloading";
    default:
      return "queued";
  }
}

}  // namespace

int64_t InputBytes(const RequestArrived& request) {
  int64_t bytes = 0;
  if (request.prepare_ttl) return bytes;
  for (TensorId id : InputsOf(request.spec, request.direction, request.recompute_forward)) {
    if (!request.residual.empty() && !IsSentBesideResidual(id)) continue;
    bytes += BytesOf(request.spec, id);
  }
  return bytes;
}

int64_t BytesOf(const OperationView& view) {
  int64_t bytes = sizeof(OperationView) + view.request_id.capacity() + view.principal.capacity();
  for (const std::string& member : view.members) bytes += sizeof(member) + member.capacity();
  if (view.plan) bytes += BytesOf(*view.plan);
  if (view.failure) bytes += view.failure->message.capacity() + view.failure->field.capacity();
  return bytes;
}

Requests::Name Requests::NameOf(const Request& request) {
  return {request.arrived.principal, request.arrived.request_id};
}

Request& Requests::Add(RequestArrived arrived) {
  const int64_t bytes = InputBytes(arrived);
  const auto [entry, is_new] = requests_.try_emplace(arrived.stream);
  assert(is_new);
  Request& request = entry->second;
  request.spec = std::make_shared<const AttentionSpec>(std::move(arrived.spec));
  arrived.spec = {};
  request.arrived = std::move(arrived);
  request.arrived_at = batch_.now();
  request.bytes = bytes;
  request.query_tokens = request.spec->shape.batch * request.spec->shape.seq_len_q;
  request.many_documents = PlannedDocuments(*request.spec) > kManyDocuments;
  stream_by_name_[NameOf(request)] = request.stream();
  ++count_by_client_[request.arrived.client];
  SetState(request, v1::REQUEST_STATE_QUEUED);
  return request;
}

void Requests::SetState(Request& request, v1::RequestState state) {
  if (request.state == state) return;
  request.state = state;
  batch_.Emit(StateChanged{request.stream(), state});
}

void Requests::Succeed(Request& request, Outcome outcome) {
  SetState(request, v1::REQUEST_STATE_SUCCEEDED);
  batch_.Emit(FinishRequest{request.stream(), batch_.now() - request.download_at,
                            std::move(outcome.residual_handle), std::move(outcome.residual_reason),
                            outcome.prepared});
  Forget(request, std::nullopt);
}

void Requests::Fail(Request& request, const Failure& failure) {
  batch_.Emit(FailSilently(request, failure));
}

FailRequest Requests::FailSilently(Request& request, const Failure& failure) {
  SetState(request, v1::REQUEST_STATE_FAILED);
  FailRequest fail{request.stream(), failure};
  Forget(request, failure);
  return fail;
}

void Requests::Refuse(StreamId stream, const Failure& failure) {
  batch_.Emit(StateChanged{stream, v1::REQUEST_STATE_FAILED});
  batch_.Emit(FailRequest{stream, failure});
}

void Requests::Forget(const Request& request, const std::optional<Failure>& failure) {
  OperationView view = ViewOf(request);
  view.failure = failure;
  stream_by_name_.erase(NameOf(request));
  const auto count = count_by_client_.find(request.arrived.client);
  if (--count->second == 0) count_by_client_.erase(count);
  requests_.erase(StreamId{request.stream()});

  const int64_t bytes = BytesOf(view);
  finished_bytes_ += bytes;
  finished_.push_back({std::move(view), bytes});
  const Limits& limits = config_.limits;
  while (static_cast<int64_t>(finished_.size()) > limits.finished_operations_kept ||
         finished_bytes_ > limits.finished_operation_bytes) {
    finished_bytes_ -= finished_.front().bytes;
    finished_.pop_front();
  }
}

std::vector<std::pair<StreamId, Failure>> Requests::CheckTimers(
    std::optional<absl::Time> ringless_since) const {
  std::vector<std::pair<StreamId, Failure>> ended;
  for (const auto& [stream, request] : requests_) {
    if (request.arrived.deadline <= batch_.now()) {
      ended.emplace_back(stream, DeadlineExceeded(StateWord(request.state)));
    } else if (ringless_since && request.state == v1::REQUEST_STATE_QUEUED &&
               batch_.now() - std::max(request.arrived_at, *ringless_since) >
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

const Request* Requests::Find(StreamId stream) const {
  const auto found = requests_.find(stream);
  return found == requests_.end() ? nullptr : &found->second;
}

int64_t Requests::CountOf(const std::string& client) const {
  const auto found = count_by_client_.find(client);
  return found == count_by_client_.end() ? 0 : found->second;
}

const Request* Requests::FindById(const std::string& request_id,
                                  const std::string& principal) const {
  const auto found = stream_by_name_.find(Name{principal, request_id});
  return found == stream_by_name_.end() ? nullptr : &requests_.at(found->second);
}

std::optional<OperationView> Requests::FindView(const std::string& request_id,
                                                const std::string& principal) const {
  if (const Request* request = FindById(request_id, principal)) return ViewOf(*request);
  const auto ended =
      std::find_if(finished_.rbegin(), finished_.rend(), [&](const Finished& finished) {
        return finished.view.request_id == request_id && finished.view.principal == principal;
      });
  if (ended == finished_.rend()) return std::nullopt;
  return ended->view;
}

OperationView Requests::ViewOf(const Request& request) const {
  OperationView view;
  view.request_id = request.arrived.request_id;
  view.principal = request.arrived.principal;
  view.state = request.state;
  view.generation = request.generation;
  view.plan = request.plan;
  view.members = request.member_names;
  return view;
}

}  // namespace ringattn::server
