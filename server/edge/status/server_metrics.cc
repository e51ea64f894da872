#include "server/edge/status/server_metrics.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/core/loss/losses.h"

namespace ringattn::server {

namespace {

constexpr const char* kMethods[] = {"Forward", "Backward"};

// Status codes of calls (attention.proto). Other codes get a series when they occur.
constexpr const char* kCodes[] = {"OK",
                                  "CANCELLED",
                                  "INVALID_ARGUMENT",
                                  "DEADLINE_EXCEEDED",
                                  "RESOURCE_EXHAUSTED",
                                  "FAILED_PRECONDITION",
                                  "ABORTED",
                                  "UNIMPLEMENTED",
                                  "INTERNAL",
                                  "UNAVAILABLE"};

// 100 us to 100 s: decode over a fast link to prefill of a long prompt.
prometheus::Histogram::BucketBoundaries KvStepBuckets() {
  return {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
          0.2,    0.5,    1,      2,     5,     10,    20,   50,   100};
}

// Index in kMethods.
size_t IndexOf(Direction direction) { return direction == Direction::kForward ? 0 : 1; }

}  // namespace

const char* TransportName(v1::Transport transport) {
  switch (transport) {
    case v1::TRANSPORT_RELAY:
      return "relay";
    case v1::TRANSPORT_DIRECT:
      return "direct";
    case v1::TRANSPORT_HOST_MEMORY:
      return "host_memory";
    case v1::TRANSPORT_CUDA_MEMORY:
      return "cuda_memory";
    default:
      return "";
  }
}

ServerMetrics::ServerMetrics(Metrics* metrics, const Limits& limits)
    : requests_(metrics->Counters("ringattn_requests_total",
                                  "Forward and Backward calls that ended, by status code.")),
      preparations_(metrics->Counters("ringattn_preparations_total",
                                      "Requests with prepare that succeeded, by result.")),
      idle_transfers_(metrics->Counters(
          "ringattn_idle_transfers_total",
          "Requests ended because the client sent or took no tensor bytes for too long.")),
      stalled_workers_(metrics->Counters(
          "ringattn_stalled_workers_total",
          "Live workers evicted because they took no bytes of an upload, or sent none of a "
          "result, for too long.")),
      worker_up_(
          metrics->Gauges("ringattn_worker_up",
                          "1 for a rank of the ready ring, 0 for a rank that existed earlier.")),
      losses_(
          metrics->Counters("ringattn_worker_losses_total", "Workers lost, by name and reason.")) {
  auto& tokens = metrics->Counters(
      "ringattn_request_tokens_total",
      "Query tokens, over all batch rows, of Forward and Backward calls that succeeded.");
  auto& stages = StageDurations(*metrics);
  auto& transports = metrics->Counters("ringattn_transport_requests_total",
                                       "Requests accepted, by the transport of their tensors.");
  auto& bytes = TensorBytes(*metrics);
  bytes_up_ = &bytes.Add({{"direction", "up"}, {"transport", "relay"}});
  bytes_down_ = &bytes.Add({{"direction", "down"}, {"transport", "relay"}});
  for (const v1::Transport transport : {v1::TRANSPORT_RELAY, v1::TRANSPORT_DIRECT,
                                        v1::TRANSPORT_HOST_MEMORY, v1::TRANSPORT_CUDA_MEMORY}) {
    if (transport != v1::TRANSPORT_RELAY) {
      const char* name = TransportName(transport);
      member_bytes_up_[transport] = &bytes.Add({{"direction", "up"}, {"transport", name}});
      member_bytes_down_[transport] = &bytes.Add({{"direction", "down"}, {"transport", name}});
    }
    accepted_[transport] = &transports.Add({{"transport", TransportName(transport)}});
  }
  const auto gauge = [metrics](const char* name, const char* help) {
    return &metrics->Gauges(name, help).Add({});
  };
  inline_requests_ =
      &metrics
           ->Counters("ringattn_inline_requests_total",
                      "Requests that needed one message to their worker and one back.")
           .Add({});
  carried_calls_ = &metrics
                        ->Counters("ringattn_shared_calls_total",
                                   "Forward and Backward calls that began on a Calls stream.")
                        .Add({});
  calls_streams_ = gauge("ringattn_calls_streams", "Open Calls streams.");
  resting_threads_ = gauge("ringattn_resting_callback_threads",
                           "Callback threads that rest, because no tensors pass through.");
  auto& plans = metrics->Counters("ringattn_plans_total",
                                  "Plans of requests: made, or found in the cache of plans.");
  plans_made_ = &plans.Add({{"source", "made"}});
  plans_cached_ = &plans.Add({{"source", "cache"}});
  plan_cache_bytes_ = gauge("ringattn_plan_cache_bytes", "Memory of cached plans.");
  regions_ = gauge("ringattn_regions", "Regions of memory that clients share.");
  queue_depth_ = gauge("ringattn_queue_depth", "Requests waiting for admission.");
  queue_bytes_ = gauge("ringattn_queue_bytes", "Input bytes of requests waiting for admission.");
  active_requests_ = gauge("ringattn_active_requests", "Requests admitted and not yet ended.");
  reserved_bytes_ =
      gauge("ringattn_reserved_bytes", "Worker memory reserved for requests, summed over workers.");
  generation_ = gauge("ringattn_ring_generation", "Generation of the ring.");
  ring_members_ = gauge("ringattn_ring_members", "Members of the ring; 0 unless it is ready.");
  ring_hosts_ = gauge("ringattn_ring_hosts", "Hosts of the ring's members; 0 unless it is ready.");
  host_link_bytes_per_second_ =
      gauge("ringattn_ring_host_link_bytes_per_second",
            "Slowest measured link between hosts of the ring; 0: one host, or not measured.");
  host_total_bytes_per_second_ =
      gauge("ringattn_ring_host_total_bytes_per_second",
            "Measured rate of all workers of a host together to another host; 0: not measured.");
  parted_workers_ = gauge("ringattn_parted_workers",
                          "Connected workers outside the ring that cannot reach its members.");
  connected_workers_ =
      gauge("ringattn_connected_workers", "Connected workers, in the ring or not.");
  gauge("ringattn_max_queued_requests", "Limit on requests waiting for admission.")
      ->Set(static_cast<double>(limits.max_queued_requests));
  gauge("ringattn_max_queued_bytes", "Limit on the input bytes of waiting requests.")
      ->Set(static_cast<double>(limits.max_queued_bytes));
  reforms_ =
      &metrics->Counters("ringattn_ring_reforms_total", "Rings formed after the first.").Add({});
  residuals_ = gauge("ringattn_residuals", "Residuals kept for a Backward.");
  residual_holds_ = gauge("ringattn_residual_holds", "Open HoldResiduals streams.");
  waiting_writers_ =
      gauge("ringattn_waiting_writers", "Streams that wait for other writers of their request.");
  residual_bytes_ =
      gauge("ringattn_residual_bytes", "Worker memory used by residuals, summed over workers.");
  gauge("ringattn_max_residual_bytes", "Limit on the worker memory used by residuals.")
      ->Set(static_cast<double>(limits.max_residual_bytes));
  const auto counter = [&](const char* name, const char* help) {
    return &metrics->Counters(name, help).Add({});
  };
  outlived_losses_ = counter("ringattn_requests_outlived_loss_total",
                             "Requests that succeeded after their ring had lost another member.");
  residuals_kept_ = counter("ringattn_residuals_kept_total", "Forwards that kept a residual.");
  residuals_refused_ = counter("ringattn_residuals_refused_total",
                               "Forwards whose requested residual was not kept.");
  residual_reads_ =
      counter("ringattn_residual_reads_total", "Backwards that succeeded with a residual.");
  auto& ended =
      metrics->Counters("ringattn_residuals_ended_total", "Residuals that ended, by reason.");
  for (const ResidualEnd end : kResidualEnds) {
    residuals_ended_.push_back(&ended.Add({{"reason", ResidualEndName(end)}}));
  }
  kv_caches_ = gauge("ringattn_kv_caches", "K/V caches that exist.");
  kv_open_caches_ = gauge("ringattn_kv_open_caches", "K/V caches that have a writer.");
  kv_cache_bytes_ = gauge("ringattn_kv_cache_bytes",
                          "Worker memory reserved for K/V caches, summed over workers.");
  kv_holds_ = gauge("ringattn_kv_holds", "Open HoldCaches streams.");
  kv_relays_ = gauge("ringattn_kv_relay_streams", "Open Steps streams on the relay.");
  gauge("ringattn_max_kv_caches", "Limit on K/V caches.")
      ->Set(static_cast<double>(limits.max_kv_caches));
  kv_created_ = counter("ringattn_kv_caches_created_total", "K/V caches created.");
  kv_refused_ = counter("ringattn_kv_caches_refused_total", "CreateCache calls that failed.");
  kv_opened_ = counter("ringattn_kv_caches_opened_total", "OpenCache calls that succeeded.");
  kv_adopted_ = counter("ringattn_kv_caches_adopted_total",
                        "K/V caches taken over from an earlier coordinator.");
  auto& kv_ended =
      metrics->Counters("ringattn_kv_caches_ended_total", "K/V caches that ended, by reason.");
  for (const KvCacheEnd end : kKvCacheEnds) {
    kv_ended_.push_back(&kv_ended.Add({{"reason", KvCacheEndName(end)}}));
  }
  kv_step_seconds_ =
      &metrics
           ->Histograms("ringattn_kv_step_seconds",
                        "Time of a step on the relay, from StepBegin to its last result.")
           .Add({}, KvStepBuckets());
  // Series exist before the first request, so that rates start at zero.
  for (const char* method : kMethods) {
    auto& by_code = requests_by_code_.emplace_back();
    for (const char* code : kCodes) {
      by_code[code] = &requests_.Add({{"method", method}, {"code", code}});
    }
    tokens_by_method_.push_back(&tokens.Add({{"method", method}}));
  }
  for (const char* stage : {"upload", "download"}) idle_transfers_.Add({{"stage", stage}});
  for (const char* method : kMethods) {
    for (const char* result : {"made", "found"}) {
      preparations_.Add({{"method", method}, {"result", result}});
    }
  }
  stalled_uploads_ = &stalled_workers_.Add({{"stage", "upload"}});
  stalled_downloads_ = &stalled_workers_.Add({{"stage", "download"}});
  for (const char* stage : {"queue", "upload", "compute", "download"}) {
    stages_[stage] = &stages.Add({{"stage", stage}}, StageBuckets());
  }
}

void ServerMetrics::RequestEnded(Direction direction, const char* code) {
  const auto& by_code = requests_by_code_[IndexOf(direction)];
  const auto known = by_code.find(code);
  if (known != by_code.end()) return known->second->Increment();
  requests_.Add({{"method", kMethods[IndexOf(direction)]}, {"code", code}}).Increment();
}

void ServerMetrics::Served(Direction direction, int64_t query_tokens) {
  tokens_by_method_[IndexOf(direction)]->Increment(static_cast<double>(query_tokens));
}

void ServerMetrics::Prepared(Direction direction, bool found) {
  preparations_
      .Add({{"method", kMethods[IndexOf(direction)]}, {"result", found ? "found" : "made"}})
      .Increment();
}

void ServerMetrics::IdleEnded(const char* stage) {
  idle_transfers_.Add({{"stage", stage}}).Increment();
}

void ServerMetrics::StageTook(const char* stage, absl::Duration duration) {
  stages_.at(stage)->Observe(absl::ToDoubleSeconds(duration));
}

void ServerMetrics::Accepted(v1::Transport transport) { accepted_.at(transport)->Increment(); }

void ServerMetrics::SetStats(const CoordinatorStats& stats) {
  regions_->Set(static_cast<double>(stats.regions));
  queue_depth_->Set(stats.queued_requests);
  queue_bytes_->Set(stats.queued_bytes);
  active_requests_->Set(stats.active_requests);
  reserved_bytes_->Set(stats.reserved_bytes);
  generation_->Set(stats.generation);
  ring_members_->Set(stats.ready_workers);
  connected_workers_->Set(stats.connected_workers);
  parted_workers_->Set(stats.parted_workers);
  reforms_->Increment(stats.ring_reforms - seen_.ring_reforms);
  outlived_losses_->Increment(stats.outlived_losses - seen_.outlived_losses);
  stalled_uploads_->Increment(stats.stalled_uploads - seen_.stalled_uploads);
  SetResiduals(stats.residuals);
  SetKvCaches(stats.kv_caches);
  stalled_downloads_->Increment(stats.stalled_downloads - seen_.stalled_downloads);
  seen_ = stats;
}

void ServerMetrics::SetPlanning(const PlanningStats& stats) {
  plans_made_->Increment(static_cast<double>(stats.made - seen_planning_.made));
  plans_cached_->Increment(static_cast<double>(stats.from_cache - seen_planning_.from_cache));
  plan_cache_bytes_->Set(static_cast<double>(stats.cache_bytes));
  seen_planning_ = stats;
}

void ServerMetrics::SetResidualHolds(int64_t streams) {
  residual_holds_->Set(static_cast<double>(streams));
}

void ServerMetrics::SetWaitingWriters(int64_t streams) {
  waiting_writers_->Set(static_cast<double>(streams));
}

void ServerMetrics::SetKvStreams(int64_t holds, int64_t relays) {
  kv_holds_->Set(static_cast<double>(holds));
  kv_relays_->Set(static_cast<double>(relays));
}

void ServerMetrics::SetCallsStreams(int64_t streams) {
  calls_streams_->Set(static_cast<double>(streams));
}

void ServerMetrics::SetRestingThreads(int threads) { resting_threads_->Set(threads); }

void ServerMetrics::KvStepRelayed(absl::Duration duration) {
  kv_step_seconds_->Observe(absl::ToDoubleSeconds(duration));
}

void ServerMetrics::SetKvCaches(const KvCacheCounts& counts) {
  const KvCacheCounts& seen = seen_.kv_caches;
  kv_caches_->Set(static_cast<double>(counts.caches));
  kv_open_caches_->Set(static_cast<double>(counts.open));
  kv_cache_bytes_->Set(static_cast<double>(counts.bytes));
  kv_created_->Increment(counts.created - seen.created);
  kv_refused_->Increment(counts.refused - seen.refused);
  kv_opened_->Increment(counts.opened - seen.opened);
  kv_adopted_->Increment(counts.adopted - seen.adopted);
  for (size_t end = 0; end < kv_ended_.size(); ++end) {
    kv_ended_[end]->Increment(counts.ended[end] - seen.ended[end]);
  }
}

void ServerMetrics::SetResiduals(const ResidualCounts& counts) {
  residuals_->Set(static_cast<double>(counts.residuals));
  residual_bytes_->Set(static_cast<double>(counts.bytes));
  residuals_kept_->Increment(counts.kept - seen_.residuals.kept);
  residuals_refused_->Increment(counts.refused - seen_.residuals.refused);
  residual_reads_->Increment(counts.reads - seen_.residuals.reads);
  for (size_t end = 0; end < residuals_ended_.size(); ++end) {
    residuals_ended_[end]->Increment(counts.ended[end] - seen_.residuals.ended[end]);
  }
}

std::string ServerMetrics::LabelOf(const std::string& worker) {
  if (worker_names_.count(worker) > 0) return worker;
  if (worker_names_.size() >= kMaxWorkerNames) return "other";
  worker_names_.insert(worker);
  return worker;
}

void ServerMetrics::WorkerLost(const LostWorker& loss) {
  losses_.Add({{"worker", LabelOf(loss.worker)}, {"reason", LossReasonName(loss.reason)}})
      .Increment();
}

void ServerMetrics::SetTopology(const v1::Topology& topology) {
  // A worker's series exist before its first loss, so that the increase to 1 is visible.
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (worker_names_.count(worker.name()) > 0) continue;
    for (const LossReason reason : kLossReasons) {
      losses_.Add({{"worker", LabelOf(worker.name())}, {"reason", LossReasonName(reason)}});
    }
  }
  for (prometheus::Gauge* gauge : workers_seen_) gauge->Set(0);
  std::set<std::string> hosts;
  double host_link = 0, host_total = 0;
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    hosts.insert(worker.location().host());
    if (const double link = worker.host_link_bytes_per_second(); link > 0) {
      host_link = host_link == 0 ? link : std::min(host_link, link);
    }
    host_total = std::max(host_total, worker.host_total_bytes_per_second());
    prometheus::Gauge& gauge =
        worker_up_.Add({{"rank", absl::StrCat(worker.rank())}, {"device", worker.device()}});
    gauge.Set(1);
    if (std::find(workers_seen_.begin(), workers_seen_.end(), &gauge) == workers_seen_.end()) {
      workers_seen_.push_back(&gauge);
    }
  }
  ring_hosts_->Set(static_cast<double>(hosts.size()));
  host_link_bytes_per_second_->Set(host_link);
  host_total_bytes_per_second_->Set(host_total);
}

}  // namespace ringattn::server
