#include "server/edge/server_metrics.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ringattn::server {

ServerMetrics::ServerMetrics(Metrics* metrics)
    : requests_(metrics->Counters("ringattn_requests_total",
                                  "Forward and Backward calls that ended, by status code.")),
      idle_transfers_(metrics->Counters(
          "ringattn_idle_transfers_total",
          "Requests ended because the client sent or took no tensor bytes for too long.")),
      stalled_workers_(metrics->Counters(
          "ringattn_stalled_workers_total",
          "Workers lost because they lived and took no bytes of an upload, or sent none of a "
          "result, for too long.")),
      stages_(StageDurations(*metrics)),
      worker_up_(metrics->Gauges("ringattn_worker_up",
                                 "1 if the rank of the ring is served, 0 if it was once.")) {
  auto& bytes = TensorBytes(*metrics);
  bytes_up_ = &bytes.Add({{"direction", "up"}, {"transport", "coordinator_stream"}});
  bytes_down_ = &bytes.Add({{"direction", "down"}, {"transport", "coordinator_stream"}});
  const auto gauge = [metrics](const char* name, const char* help) {
    return &metrics->Gauges(name, help).Add({});
  };
  queue_depth_ = gauge("ringattn_queue_depth", "Requests that wait to be admitted.");
  queue_bytes_ = gauge("ringattn_queue_bytes", "Input bytes of the requests that wait.");
  active_requests_ = gauge("ringattn_active_requests", "Requests admitted and not yet ended.");
  reserved_bytes_ = gauge("ringattn_reserved_bytes",
                          "Worker memory reserved for requests, all workers together.");
  generation_ = gauge("ringattn_ring_generation", "Generation of the ring.");
  reforms_ = &metrics
                  ->Counters("ringattn_ring_reforms_total",
                             "Times that a ring was formed again after the first.")
                  .Add({});
  // The series exist before the first request, so that rates start at zero.
  for (const char* method : {"Forward", "Backward"}) {
    requests_.Add({{"method", method}, {"code", "OK"}});
  }
  for (const char* stage : {"upload", "download"}) idle_transfers_.Add({{"stage", stage}});
  stalled_uploads_ = &stalled_workers_.Add({{"stage", "upload"}});
  stalled_downloads_ = &stalled_workers_.Add({{"stage", "download"}});
  for (const char* stage : {"queue", "upload", "compute", "download"}) {
    stages_.Add({{"stage", stage}}, StageBuckets());
  }
}

void ServerMetrics::RequestEnded(Direction direction, const char* code) {
  const char* method = direction == Direction::kForward ? "Forward" : "Backward";
  requests_.Add({{"method", method}, {"code", code}}).Increment();
}

void ServerMetrics::IdleEnded(const char* stage) {
  idle_transfers_.Add({{"stage", stage}}).Increment();
}

void ServerMetrics::StageTook(const char* stage, absl::Duration duration) {
  stages_.Add({{"stage", stage}}, StageBuckets()).Observe(absl::ToDoubleSeconds(duration));
}

void ServerMetrics::SetStats(const CoordinatorStats& stats) {
  queue_depth_->Set(stats.queued_requests);
  queue_bytes_->Set(stats.queued_bytes);
  active_requests_->Set(stats.active_requests);
  reserved_bytes_->Set(stats.reserved_bytes);
  generation_->Set(stats.generation);
  reforms_->Increment(stats.ring_reforms - seen_.ring_reforms);
  stalled_uploads_->Increment(stats.stalled_uploads - seen_.stalled_uploads);
  stalled_downloads_->Increment(stats.stalled_downloads - seen_.stalled_downloads);
  seen_ = stats;
}

void ServerMetrics::SetTopology(const v1::Topology& topology) {
  for (prometheus::Gauge* gauge : workers_seen_) gauge->Set(0);
  for (const v1::WorkerInfo& worker : topology.workers()) {
    if (!worker.has_rank()) continue;
    prometheus::Gauge& gauge =
        worker_up_.Add({{"rank", absl::StrCat(worker.rank())}, {"device", worker.device()}});
    gauge.Set(1);
    if (std::find(workers_seen_.begin(), workers_seen_.end(), &gauge) == workers_seen_.end()) {
      workers_seen_.push_back(&gauge);
    }
  }
}

}  // namespace ringattn::server
