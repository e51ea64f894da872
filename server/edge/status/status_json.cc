#include "server/edge/status/status_json.h"

#include <algorithm>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "common/observability/trace_context.h"
#include "server/core/loss/losses.h"

namespace ringattn::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxTextBytes = 256;
// Workers outside the ring are not bounded by the ring.
constexpr size_t kMaxWorkers = 128;

// Places that a worker cannot reach.
constexpr int kMaxPartedFrom = 4;

// External text. A character cut in the middle becomes a replacement character.
std::string Text(absl::string_view text) { return std::string(text.substr(0, kMaxTextBytes)); }

// "RING_STATE_READY" -> "ready".
std::string Word(absl::string_view name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

double UnixSeconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

Json InterfacesJson(const v1::WorkerLocation& location) {
  Json interfaces = Json::array();
  for (const v1::NetworkInterface& interface : location.interfaces()) {
    Json addresses = Json::array();
    for (const std::string& address : interface.addresses()) addresses.push_back(Text(address));
    interfaces.push_back({{"name", Text(interface.name())}, {"addresses", addresses}});
  }
  return interfaces;
}

Json WorkerJson(const WorkerSnapshot& worker) {
  const v1::WorkerInfo& info = worker.info;
  Json parted_from = Json::array();
  for (int i = 0; i < std::min(info.parted_from_size(), kMaxPartedFrom); ++i) {
    parted_from.push_back(Text(info.parted_from(i)));
  }
  return {{"name", Text(info.name())},
          {"incarnation", Text(info.incarnation())},
          {"rank", info.has_rank() ? Json(info.rank()) : Json()},
          {"state", Word(v1::WorkerState_Name(info.state()), "WORKER_STATE_")},
          {"parted_from", parted_from},
          {"device", Text(info.device())},
          {"host", Text(info.location().host())},
          {"accelerator_domain", Text(info.location().accelerator_domain())},
          {"slot", info.location().has_slot() ? Json(info.location().slot()) : Json()},
          {"zone", Text(info.location().zone())},
          {"interfaces", InterfacesJson(info.location())},
          {"computes", Text(worker.computes)},
          {"done", worker.computed_fraction},
          {"waits_for_peer", worker.waits_for_peer},
          {"memory_bytes", info.memory_bytes()},
          {"reserved_bytes", info.reserved_bytes()},
          {"kv_cache_bytes", info.kv_cache_bytes()},
          {"max_kv_cache_bytes", info.max_kv_cache_bytes()},
          {"kv_caches", info.kv_caches()},
          {"link_bytes_per_second", info.link_bytes_per_second()},
          {"host_link_bytes_per_second", info.host_link_bytes_per_second()},
          {"host_total_bytes_per_second", info.host_total_bytes_per_second()},
          {"next_transport", Text(info.next_transport())},
          {"silence_seconds", Seconds(worker.silence)},
          {"data_address", Text(info.data_address())},
          {"metrics_address", Text(info.metrics_address())}};
}

// Fraction of the stage's work; null for a stage that only waits.
Json DoneJson(const RequestSnapshot& request, const TransferTotals& totals) {
  const auto share = [](int64_t part, int64_t whole) {
    return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  switch (request.stage) {
    case RequestStage::kUploading:
      return share(totals.received_bytes, totals.bytes_up);
    case RequestStage::kComputing:
      return request.computed_fraction;
    case RequestStage::kDownloading:
      return share(totals.sent_bytes, totals.bytes_down);
    default:
      return nullptr;
  }
}

Json RequestJson(const RequestSnapshot& request, const TransferTotals& totals, absl::Time when) {
  Json members = Json::array();
  for (const std::string& member : request.members) members.push_back(Text(member));
  const absl::Duration left = request.deadline - when;
  return {{"stream", request.stream},
          {"request_id", Text(request.request_id)},
          {"principal", Text(request.principal)},
          {"trace_id", std::string(TraceIdOf(request.traceparent))},
          {"direction", request.direction == Direction::kForward ? "forward" : "backward"},
          {"stage", RequestStageName(request.stage)},
          {"done", DoneJson(request, totals)},
          {"query_tokens", request.query_tokens},
          {"input_bytes", request.input_bytes},
          {"age_seconds", Seconds(when - request.arrived_at)},
          {"deadline_seconds", left == absl::InfiniteDuration() ? Json() : Json(Seconds(left))},
          {"members", members}};
}

Json LossJson(const LostWorker& loss) {
  return {{"time", UnixSeconds(loss.when)}, {"worker", Text(loss.worker)},
          {"device", Text(loss.device)},    {"rank", loss.rank ? Json(*loss.rank) : Json()},
          {"generation", loss.generation},  {"reason", LossReasonName(loss.reason)},
          {"detail", Text(loss.detail)},    {"ended_requests", loss.ended_requests}};
}

// Members by rank, and their sums.
void AddWorkers(const CoordinatorSnapshot& core, Json* json) {
  int64_t members = 0, memory = 0, reserved = 0;
  std::set<std::string> hosts;
  Json rows = Json::array();
  for (const WorkerSnapshot& worker : core.workers) {
    if (rows.size() < kMaxWorkers) rows.push_back(WorkerJson(worker));
    if (!worker.info.has_rank()) continue;
    ++members;
    hosts.insert(worker.info.location().host());
    memory += static_cast<int64_t>(worker.info.memory_bytes());
    reserved += static_cast<int64_t>(worker.info.reserved_bytes());
  }
  (*json)["ring"] = {{"state", Word(v1::RingState_Name(core.ring_state), "RING_STATE_")},
                     {"generation", core.generation},
                     {"members", members},
                     {"hosts", hosts.size()},
                     {"workers", core.workers.size()},
                     {"reforms", core.ring_reforms}};
  (*json)["memory"] = {{"bytes", memory}, {"reserved_bytes", reserved}};
  (*json)["workers"] = std::move(rows);
}

void AddRequests(const ServerStatus& status, Json* json) {
  const CoordinatorSnapshot& core = status.core;
  int64_t in_flight = 0;
  Json stages = Json::object();
  for (size_t stage = 0; stage < kRequestStages; ++stage) {
    in_flight += core.requests_by_stage[stage];
    stages[RequestStageName(static_cast<RequestStage>(stage))] = core.requests_by_stage[stage];
  }
  Json rows = Json::array();
  for (size_t i = 0; i < core.requests.size(); ++i) {
    const TransferTotals totals =
        i < status.transfers.size() ? status.transfers[i] : TransferTotals();
    rows.push_back(RequestJson(core.requests[i], totals, core.when));
  }
  (*json)["requests_in_flight"] = in_flight;
  (*json)["stages"] = std::move(stages);
  (*json)["requests"] = std::move(rows);
}

}  // namespace

std::string StatusJson(const StatusConstants& constants, const ServerStatus& status,
                       absl::Time now) {
  const CoordinatorSnapshot& core = status.core;
  Json json = {{"version", constants.version},
               {"time", UnixSeconds(core.when)},
               {"age_seconds", std::max(0.0, Seconds(now - core.when))},
               {"uptime_seconds", std::max(0.0, Seconds(now - constants.started_at))}};
  AddWorkers(core, &json);
  json["queue"] = {{"requests", core.queued_requests},
                   {"bytes", core.queued_bytes},
                   {"max_requests", constants.limits.max_queued_requests},
                   {"max_bytes", constants.limits.max_queued_bytes}};
  json["kv_caches"] = {{"caches", core.kv_caches.caches},
                       {"open", core.kv_caches.open},
                       {"bytes", core.kv_caches.bytes},
                       {"max_caches", constants.limits.max_kv_caches}};
  AddRequests(status, &json);
  Json losses = Json::array();
  for (const LostWorker& loss : core.losses) losses.push_back(LossJson(loss));
  json["losses"] = std::move(losses);
  // Text that is not UTF-8 gets replacement characters.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace ringattn::server
