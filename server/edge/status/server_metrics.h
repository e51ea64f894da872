// ServerMetrics: the coordinator's metrics, registered once.
#ifndef RINGATTN_SERVER_EDGE_STATUS_SERVER_METRICS_H_
#define RINGATTN_SERVER_EDGE_STATUS_SERVER_METRICS_H_

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/observability/metrics.h"
#include "common/schedule/schedule.h"
#include "ringattn/v1/cluster.pb.h"
#include "server/core/coordinator.h"
#include "server/edge/data/data_plane.h"
#include "server/planning/planning_service.h"

namespace ringattn::server {

// Returns the name in metrics and logs: "relay", "direct", "host_memory", ...; "" for none.
const char* TransportName(v1::Transport transport);

// Thread safe, except SetStats, SetPlanning, SetTopology and WorkerLost, which one thread must
// call.
class ServerMetrics {
 public:
  // Number of distinct worker names in labels over the process's life; further names become
  // "other".
  static constexpr size_t kMaxWorkerNames = 256;

  ServerMetrics(Metrics* metrics, const Limits& limits);

  void RequestEnded(Direction direction, const char* code);
  // Counts a request that succeeded.
  void Served(Direction direction, int64_t query_tokens);
  // Counts a request with `prepare` that succeeded. `found`: every member had the part already.
  void Prepared(Direction direction, bool found);
  // Counts a request ended by the idle limit of uploads ("upload") or downloads ("download").
  void IdleEnded(const char* stage);
  // REQUIRES: `stage` is "queue", "upload", "compute" or "download".
  void StageTook(const char* stage, absl::Duration duration);
  void ReceivedFromClient(int64_t bytes) { bytes_up_->Increment(bytes); }
  void SentToClient(int64_t bytes) { bytes_down_->Increment(bytes); }

  void Accepted(v1::Transport transport);
  // Counts a request whose tensors travelled in Reserve and Finished, in addition to Accepted.
  void AcceptedInline() { inline_requests_->Increment(); }
  // A call began on a Calls stream.
  void CarriedCall() { carried_calls_->Increment(); }
  // Counts the bytes of a successful request whose tensors bypassed the coordinator.
  void MovedByMembers(v1::Transport transport, const TransferTotals& totals) {
    member_bytes_up_.at(transport)->Increment(static_cast<double>(totals.bytes_up));
    member_bytes_down_.at(transport)->Increment(static_cast<double>(totals.bytes_down));
  }

  void SetResidualHolds(int64_t streams);
  // Streams that wait for other writers of their request.
  void SetWaitingWriters(int64_t streams);
  // Open HoldCaches streams, and open Steps streams on the relay.
  void SetKvStreams(int64_t holds, int64_t relays);
  void SetCallsStreams(int64_t streams);
  void SetRestingThreads(int threads);
  // Counts a step on the relay. `duration`: from its StepBegin to its last result.
  void KvStepRelayed(absl::Duration duration);
  void SetStats(const CoordinatorStats& stats);
  void SetPlanning(const PlanningStats& stats);
  void WorkerLost(const LostWorker& loss);
  // Sets the gauges of the ring's hosts and ringattn_worker_up{rank, device}: 1 for each member of
  // a ready ring, 0 for a rank that existed earlier.
  void SetTopology(const v1::Topology& topology);

 private:
  void SetResiduals(const ResidualCounts& counts);
  void SetKvCaches(const KvCacheCounts& counts);
  // Returns the label for a worker's losses.
  std::string LabelOf(const std::string& worker);

  prometheus::Family<prometheus::Counter>& requests_;
  // Finding a series by its labels costs microseconds, so those of every request are kept. Fixed
  // after construction.
  std::vector<std::map<std::string, prometheus::Counter*, std::less<>>> requests_by_code_;
  std::vector<prometheus::Counter*> tokens_by_method_;
  prometheus::Family<prometheus::Counter>& preparations_;
  std::map<std::string, prometheus::Histogram*, std::less<>> stages_;
  std::map<v1::Transport, prometheus::Counter*> accepted_;
  prometheus::Family<prometheus::Counter>& idle_transfers_;
  prometheus::Family<prometheus::Counter>& stalled_workers_;
  prometheus::Counter* bytes_up_;
  prometheus::Counter* bytes_down_;
  // By transport that bypasses the coordinator.
  std::map<v1::Transport, prometheus::Counter*> member_bytes_up_, member_bytes_down_;
  prometheus::Counter* inline_requests_;
  prometheus::Counter* carried_calls_;
  prometheus::Gauge* calls_streams_;
  prometheus::Gauge* resting_threads_;
  prometheus::Counter* plans_made_;
  prometheus::Counter* plans_cached_;
  prometheus::Gauge* plan_cache_bytes_;
  PlanningStats seen_planning_;
  prometheus::Gauge* regions_;
  prometheus::Gauge* queue_depth_;
  prometheus::Gauge* queue_bytes_;
  prometheus::Gauge* active_requests_;
  prometheus::Gauge* reserved_bytes_;
  prometheus::Gauge* generation_;
  prometheus::Gauge* ring_members_;
  prometheus::Gauge* ring_hosts_;
  prometheus::Gauge* host_link_bytes_per_second_;
  prometheus::Gauge* host_total_bytes_per_second_;
  prometheus::Gauge* connected_workers_;
  prometheus::Gauge* parted_workers_;
  prometheus::Counter* reforms_;
  prometheus::Counter* outlived_losses_;
  prometheus::Counter* stalled_uploads_;
  prometheus::Counter* stalled_downloads_;
  prometheus::Gauge* residuals_;
  prometheus::Gauge* residual_bytes_;
  prometheus::Gauge* residual_holds_;
  prometheus::Gauge* waiting_writers_;
  prometheus::Counter* residuals_kept_;
  prometheus::Counter* residuals_refused_;
  prometheus::Counter* residual_reads_;
  std::vector<prometheus::Counter*> residuals_ended_;  // by ResidualEnd
  prometheus::Gauge* kv_caches_;
  prometheus::Gauge* kv_open_caches_;
  prometheus::Gauge* kv_cache_bytes_;
  prometheus::Gauge* kv_holds_;
  prometheus::Gauge* kv_relays_;
  prometheus::Counter* kv_created_;
  prometheus::Counter* kv_refused_;
  prometheus::Counter* kv_opened_;
  prometheus::Counter* kv_adopted_;
  std::vector<prometheus::Counter*> kv_ended_;  // by KvCacheEnd
  prometheus::Histogram* kv_step_seconds_;
  CoordinatorStats seen_;  // values that the counters include already
  prometheus::Family<prometheus::Gauge>& worker_up_;
  std::vector<prometheus::Gauge*> workers_seen_;
  prometheus::Family<prometheus::Counter>& losses_;
  std::set<std::string> worker_names_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_SERVER_METRICS_H_
