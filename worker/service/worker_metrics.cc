#include "worker/service/worker_metrics.h"

#include "absl/status/status.h"
#include "worker/service/run_report.h"

namespace ringattn {

WorkerMetrics::WorkerMetrics(const std::string& ring_transport)
    : generation_(metrics_
                      .Gauges("ringattn_ring_generation",
                              "Generation of the ring that this process last formed.")
                      .Add({})),
      reserved_bytes_(metrics_
                          .Gauges("ringattn_worker_reserved_bytes",
                                  "Device memory set aside for operations.")
                          .Add({})),
      received_bytes_(TensorBytes(metrics_).Add(
          {{"direction", "up"}, {"transport", "coordinator_stream"}})),
      sent_bytes_(TensorBytes(metrics_).Add(
          {{"direction", "down"}, {"transport", "coordinator_stream"}})),
      ring_bytes_(
          TensorBytes(metrics_).Add({{"direction", "ring"}, {"transport", ring_transport}})),
      flops_(metrics_
                 .Counters("ringattn_attention_flops_total",
                           "Floating-point operations of unmasked pairs, computed here.")
                 .Add({})),
      tiles_(metrics_
                 .Counters("ringattn_worker_tiles_total",
                           "128 x 128 tiles computed, per batch row and head.")
                 .Add({})),
      compute_(StageDurations(metrics_).Add({{"stage", "compute"}}, StageBuckets())),
      ring_wait_(StageDurations(metrics_).Add({{"stage", "ring_wait"}}, StageBuckets())),
      runs_(metrics_.Counters("ringattn_worker_runs_total", "Programs that ended, by status.")) {}

void WorkerMetrics::CountRun(const Operation& operation, const ExecutionReport& report) {
  ring_bytes_.Increment(static_cast<double>(report.sent_bytes));
  flops_.Increment(FlopsOf(operation));
  tiles_.Increment(static_cast<double>(report.tiles));
  compute_.Observe(absl::ToDoubleSeconds(report.compute_time));
  ring_wait_.Observe(absl::ToDoubleSeconds(report.ring_wait_time));
  runs_.Add({{"code", "OK"}}).Increment();
}

void WorkerMetrics::CountFailedRun(absl::StatusCode code) {
  runs_.Add({{"code", absl::StatusCodeToString(code)}}).Increment();
}

}  // namespace ringattn
