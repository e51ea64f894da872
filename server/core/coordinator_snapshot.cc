// Coordinator: the snapshot for operators.
#include <utility>

#include "server/core/coordinator_impl.h"

namespace ringattn::server {

using Phase = Operation::Phase;

const char* RequestStageName(RequestStage stage) {
  switch (stage) {
    case RequestStage::kPlanning:
      return "planning";
    case RequestStage::kQueued:
      return "queued";
    case RequestStage::kReserving:
      return "reserving";
    case RequestStage::kUploading:
      return "uploading";
    case RequestStage::kReady:
      return "ready";
    case RequestStage::kComputing:
      return "computing";
    case RequestStage::kDownloading:
      return "downloading";
  }
  return "unknown";
}

namespace {

RequestStage StageOf(const Request& request, const Operation* operation) {
  if (operation == nullptr) {
    return request.asked_generation != 0 ? RequestStage::kPlanning : RequestStage::kQueued;
  }
  switch (operation->phase) {
    case Phase::kReserving:
      return RequestStage::kReserving;
    case Phase::kUploading:
      return RequestStage::kUploading;
    case Phase::kUploaded:
      return RequestStage::kReady;
    case Phase::kRunning:
      return RequestStage::kComputing;
    case Phase::kDownloading:
    case Phase::kReleasing:
      return RequestStage::kDownloading;
  }
  return RequestStage::kQueued;
}

RequestSnapshot Describe(const Request& request, const Operation* operation) {
  RequestSnapshot row;
  row.stream = request.stream();
  row.request_id = request.arrived.request_id;
  row.principal = request.arrived.principal;
  row.traceparent = request.arrived.traceparent;
  row.direction = request.arrived.direction;
  row.stage = StageOf(request, operation);
  row.arrived_at = request.arrived_at;
  row.deadline = request.arrived.deadline;
  row.query_tokens = request.query_tokens;
  row.input_bytes = request.bytes;
  row.members = request.member_names;
  if (row.stage == RequestStage::kComputing) {
    row.computed_fraction = Operations::ComputedFraction(*operation);
  }
  return row;
}

}  // namespace

CoordinatorSnapshot Coordinator::Impl::Snapshot(int64_t max_requests) const {
  CoordinatorSnapshot snapshot;
  snapshot.when = batch_.now();
  const CoordinatorStats numbers = stats();
  snapshot.generation = numbers.generation;
  snapshot.ring_reforms = numbers.ring_reforms;
  snapshot.queued_requests = numbers.queued_requests;
  snapshot.queued_bytes = numbers.queued_bytes;
  snapshot.reserved_bytes = numbers.reserved_bytes;
  snapshot.kv_caches = numbers.kv_caches;

  v1::Topology shown = topology();
  snapshot.ring_state = shown.state();
  const std::vector<ConnectionId> order = WorkersInOrder();
  for (size_t i = 0; i < order.size(); ++i) {
    const Worker& worker = roster_.at(order[i]);
    WorkerSnapshot& row = snapshot.workers.emplace_back();
    row.info = std::move(*shown.mutable_workers(static_cast<int>(i)));
    row.silence = batch_.now() - worker.last_heard;
    row.computes = worker.heartbeat.operation_id();
    row.computed_fraction = worker.heartbeat.fraction_done();
    row.waits_for_peer = worker.heartbeat.waits_for_peer();
  }

  std::vector<const Request*> waiting;
  const auto has_room = [&](size_t taken) { return static_cast<int64_t>(taken) < max_requests; };
  for (const auto& [stream, request] : requests_.all()) {
    const Operation* operation = operations_.Find(request.operation_id);
    ++snapshot.requests_by_stage[static_cast<size_t>(StageOf(request, operation))];
    if (operation != nullptr && has_room(snapshot.requests.size())) {
      snapshot.requests.push_back(Describe(request, operation));
    } else if (operation == nullptr && has_room(waiting.size())) {
      waiting.push_back(&request);
    }
  }
  for (const Request* request : waiting) {
    if (!has_room(snapshot.requests.size())) break;
    snapshot.requests.push_back(Describe(*request, nullptr));
  }
  snapshot.losses.assign(losses_.newest().begin(), losses_.newest().end());
  return snapshot;
}

}  // namespace ringattn::server
