#include "worker/service/worker_metrics.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/layout/shard_plan.h"
#include "worker/service/run_report.h"

namespace ringattn::worker {
namespace {

// Powers of 2 from 31 us to 32 s: a decode step of a short sequence to a long prefill.
prometheus::Histogram::BucketBoundaries KvCallBuckets() {
  prometheus::Histogram::BucketBoundaries bounds;
  for (double bound = 1.0 / 32768; bound < 40; bound *= 2) bounds.push_back(bound);
  return bounds;
}

}  // namespace

WorkerMetrics::WorkerMetrics()
    : info_(metrics_.Gauges(
          "ringattn_worker_info",
          "Always 1. Labels: worker, device, version, and rank in the current ring.")),
      generation_(metrics_
                      .Gauges("ringattn_ring_generation",
                              "Generation of the ring that this process formed last.")
                      .Add({})),
      memory_limit_bytes_(metrics_
                              .Gauges("ringattn_worker_memory_limit_bytes",
                                      "Device memory that operations may reserve.")
                              .Add({})),
      resident_bytes_(
          metrics_.Gauges("ringattn_resident_bytes", "Resident memory of this process.").Add({})),
      reserved_bytes_(metrics_
                          .Gauges("ringattn_worker_reserved_bytes",
                                  "Device memory that operations have reserved.")
                          .Add({})),
      residuals_(metrics_
                     .Gauges("ringattn_worker_residuals",
                             "Residuals that forward calls have left for a later backward.")
                     .Add({})),
      residual_bytes_(metrics_
                          .Gauges("ringattn_worker_residual_bytes",
                                  "Device memory of residuals, included in the reserved memory.")
                          .Add({})),
      kept_operations_(metrics_
                           .Gauges("ringattn_worker_kept_operations",
                                   "Operations that are kept for equal requests.")
                           .Add({})),
      kept_bytes_(metrics_
                      .Gauges("ringattn_worker_kept_operation_bytes",
                              "Device memory of kept operations, in addition to the reserved "
                              "memory. It is free to every request.")
                      .Add({})),
      held_recipes_(metrics_
                        .Gauges("ringattn_worker_prepared_recipes",
                                "Recipes that clients have prepared, whose lease holds.")
                        .Add({})),
      preparations_(metrics_.Counters("ringattn_worker_preparations_total",
                                      "Requests with prepare, by result.")),
      preparations_made_(preparations_.Add({{"result", "made"}})),
      preparations_found_(preparations_.Add({{"result", "found"}})),
      kept_lookups_(metrics_.Counters("ringattn_worker_kept_operation_lookups_total",
                                      "Requests that could take a kept operation, by result.")),
      kept_hits_(kept_lookups_.Add({{"result", "hit"}})),
      kept_misses_(kept_lookups_.Add({{"result", "miss"}})),
      kept_drops_(metrics_.Counters("ringattn_worker_kept_operation_drops_total",
                                    "Kept operations that no request took. Reasons: evicted (for "
                                    "memory or for another operation), expired (lease ended).")),
      kept_evictions_(kept_drops_.Add({{"reason", "evicted"}})),
      kept_expiries_(kept_drops_.Add({{"reason", "expired"}})),
      kv_caches_(metrics_.Gauges("ringattn_worker_kv_caches", "K/V caches held here.").Add({})),
      kv_cache_bytes_(metrics_
                          .Gauges("ringattn_worker_kv_cache_bytes",
                                  "Device memory of K/V caches, part of the reserved memory.")
                          .Add({})),
      kv_steps_(metrics_
                    .Counters("ringattn_worker_kv_steps_total",
                              "Steps of K/V caches that were begun, including repeated messages.")
                    .Add({})),
      kv_calls_(metrics_
                    .Histograms("ringattn_worker_kv_call_seconds",
                                "Time of layer calls of K/V caches: append and attention.")
                    .Add({}, KvCallBuckets())),
      kv_refusals_(metrics_.Counters("ringattn_worker_kv_refusals_total",
                                     "Refused rows, calls and streams of K/V caches, by reason.")),
      step_rings_(metrics_
                      .Gauges("ringattn_worker_step_rings",
                              "Writers of K/V caches that send steps through host memory.")
                      .Add({})),
      ring_requests_(metrics_.Counters(
          "ringattn_worker_step_ring_waits_total",
          "Waits for requests in step rings, by whether the thread had to sleep.")),
      ring_requests_active_(ring_requests_.Add({{"wait", "active"}})),
      ring_requests_asleep_(ring_requests_.Add({{"wait", "asleep"}})),
      device_used_bytes_(
          metrics_
              .Gauges("ringattn_device_memory_used_bytes",
                      "Memory in use on the whole GPU, by all processes; 0 on a CPU.")
              .Add({})),
      allocated_bytes_(metrics_
                           .Gauges("ringattn_device_allocated_bytes",
                                   "GPU memory allocated for operations, to compare with the "
                                   "reserved memory; 0 on a CPU.")
                           .Add({})),
      pinned_used_bytes_(metrics_
                             .Gauges("ringattn_pinned_pool_used_bytes",
                                     "Pinned staging memory in use; 0 on a CPU.")
                             .Add({})),
      achieved_flops_(metrics_
                          .Gauges("ringattn_achieved_flops_per_second",
                                  "Floating-point rate of the last program: unmasked pairs over "
                                  "the time in compute calls.")
                          .Add({})),
      received_bytes_(TensorBytes(metrics_).Add({{"direction", "up"}, {"transport", "relay"}})),
      sent_bytes_(TensorBytes(metrics_).Add({{"direction", "down"}, {"transport", "relay"}})),
      copied_in_bytes_(
          TensorBytes(metrics_).Add({{"direction", "up"}, {"transport", "host_memory"}})),
      copied_out_bytes_(
          TensorBytes(metrics_).Add({{"direction", "down"}, {"transport", "host_memory"}})),
      imported_in_bytes_(
          TensorBytes(metrics_).Add({{"direction", "up"}, {"transport", "cuda_memory"}})),
      imported_out_bytes_(
          TensorBytes(metrics_).Add({{"direction", "down"}, {"transport", "cuda_memory"}})),
      direct_in_bytes_(TensorBytes(metrics_).Add({{"direction", "up"}, {"transport", "direct"}})),
      direct_out_bytes_(
          TensorBytes(metrics_).Add({{"direction", "down"}, {"transport", "direct"}})),
      refused_streams_(metrics_.Counters("ringattn_refused_streams_total",
                                         "Direct streams that were rejected, by reason.")),
      regions_(metrics_
                   .Gauges("ringattn_worker_regions",
                           "Regions of clients' memory that this worker has mapped.")
                   .Add({})),
      pinned_bytes_(metrics_
                        .Gauges("ringattn_worker_pinned_bytes",
                                "Clients' host memory that is pinned for direct copies by the GPU.")
                        .Add({})),
      imported_bytes_(metrics_
                          .Gauges("ringattn_worker_imported_bytes",
                                  "Clients' CUDA memory that this worker has mapped; the GPU "
                                  "counts it as used until it is unmapped.")
                          .Add({})),
      refused_attaches_(
          metrics_.Counters("ringattn_refused_attaches_total",
                            "Rejected attempts of clients to share memory, by reason.")),
      flops_(metrics_
                 .Counters("ringattn_attention_flops_total",
                           "Floating-point operations of unmasked pairs that this worker computed.")
                 .Add({})),
      tokens_(metrics_
                  .Counters("ringattn_worker_tokens_total",
                            "Query tokens, of all batch rows, that this worker computed.")
                  .Add({})),
      tiles_(metrics_
                 .Counters("ringattn_worker_tiles_total",
                           "128 x 128 tiles computed, per batch row and head.")
                 .Add({})),
      kernel_calls_(metrics_.Counters(
          "ringattn_worker_kernel_calls_total",
          "Compute calls with query-key products in successful programs, by call and kernel.")),
      exchange_seconds_(
          metrics_
              .Counters("ringattn_exchange_seconds_total",
                        "Time of transfers between ranks, including waiting for peers.")
              .Add({})),
      hidden_exchange_seconds_(
          metrics_
              .Counters(
                  "ringattn_hidden_exchange_seconds_total",
                  "Portion of ringattn_exchange_seconds_total during which this device computed.")
              .Add({})),
      h2d_(StageDurations(metrics_).Add({{"stage", "h2d"}}, StageBuckets())),
      compute_(StageDurations(metrics_).Add({{"stage", "compute"}}, StageBuckets())),
      ring_wait_(StageDurations(metrics_).Add({{"stage", "ring_wait"}}, StageBuckets())),
      d2h_(StageDurations(metrics_).Add({{"stage", "d2h"}}, StageBuckets())),
      runs_(metrics_.Counters("ringattn_worker_runs_total", "Programs that ended, by status.")),
      preemptions_(metrics_
                       .Counters("ringattn_worker_preemptions_total",
                                 "Preemptions of a running program by small requests.")
                       .Add({})),
      paused_seconds_(metrics_
                          .Counters("ringattn_worker_paused_seconds_total",
                                    "Time that running programs paused for small requests.")
                          .Add({})) {
  // The series start at zero.
  for (const char* code : {"OK", "CANCELLED", "UNAVAILABLE", "INTERNAL"}) {
    runs_.Add({{"code", code}});
  }
  for (const char* reason :
       {"not_understood", "token", "descriptor", "map", "user", "kind", "device", "too_much"}) {
    refused_attaches_.Add({{"reason", reason}});
  }
  for (const char* reason : {"KV_FENCED", "KV_FULL", "KV_INCONSISTENT", "KV_LOST", "KV_NOT_FOUND",
                             "STEP_CONFLICT", "STEP_ORDER", "other"}) {
    kv_refusals_.Add({{"reason", reason}});
  }
  for (const StreamRefusal refusal : kStreamRefusals) {
    refused_streams_.Add({{"reason", StreamRefusalName(refusal)}});
  }
}

void WorkerMetrics::Describe(const std::string& worker, const std::string& device,
                             const std::string& version, int64_t memory_limit_bytes) {
  DescribeProcess(metrics_, version);
  memory_limit_bytes_.Set(static_cast<double>(memory_limit_bytes));
  {
    absl::MutexLock lock(&mutex_);
    worker_ = worker;
    device_ = device;
  }
  SetRank(std::nullopt);
}

void WorkerMetrics::ExpectKernels(const std::vector<ServedCalls>& served) {
  for (const ServedCalls& calls : served) {
    KernelCalls(calls.backward ? "backward" : "forward", calls.family,
                calls.kind.score_terms ? kTermKernelClass : kPlainKernelClass);
  }
}

prometheus::Counter& WorkerMetrics::KernelCalls(std::string_view call, std::string_view family,
                                                std::string_view kernel_class) {
  return kernel_calls_.Add({{"call", std::string(call)},
                            {"family", std::string(family)},
                            {"class", std::string(kernel_class)}});
}

// The counters follow the sums in `stats`, which only grow.
void WorkerMetrics::SetKeptOperations(const KeptOperations::Stats& stats) {
  const auto follow = [](prometheus::Counter& counter, int64_t sum) {
    counter.Increment(std::max(0.0, static_cast<double>(sum) - counter.Value()));
  };
  kept_operations_.Set(static_cast<double>(stats.count));
  kept_bytes_.Set(static_cast<double>(stats.bytes));
  held_recipes_.Set(static_cast<double>(stats.holds));
  follow(kept_hits_, stats.counts.hits);
  follow(kept_misses_, stats.counts.misses);
  follow(kept_evictions_, stats.counts.evictions);
  follow(kept_expiries_, stats.counts.expiries);
}

void WorkerMetrics::CountKvRefusal(const std::string& reason) {
  kv_refusals_.Add({{"reason", reason.empty() ? "other" : reason}}).Increment();
}

void WorkerMetrics::CountRefusedStream(StreamRefusal refusal) {
  refused_streams_.Add({{"reason", StreamRefusalName(refusal)}}).Increment();
}

void WorkerMetrics::SetRank(std::optional<int> rank) {
  absl::MutexLock lock(&mutex_);
  if (current_info_ != nullptr) info_.Remove(current_info_);
  current_info_ = &info_.Add({{"worker", worker_},
                              {"device", device_},
                              {"rank", rank ? absl::StrCat(*rank) : std::string("none")}});
  current_info_->Set(1);
}

void WorkerMetrics::CountRun(const Operation& operation, const ExecutionReport& report,
                             absl::Duration upload_copies) {
  const double flops = FlopsOf(operation);
  for (const auto& [transport, bytes] : report.sent_by_transport) {
    TensorBytes(metrics_)
        .Add({{"direction", "ring"}, {"transport", transport}})
        .Increment(static_cast<double>(bytes));
  }
  flops_.Increment(flops);
  if (report.compute_time > absl::ZeroDuration()) {
    achieved_flops_.Set(flops / absl::ToDoubleSeconds(report.compute_time));
  }
  const ShardPlan& plan = operation.plan();
  tokens_.Increment(
      static_cast<double>(operation.spec().shape.batch * RowsIn(plan.q[operation.program().rank])));
  exchange_seconds_.Increment(absl::ToDoubleSeconds(report.exchange_time));
  hidden_exchange_seconds_.Increment(absl::ToDoubleSeconds(report.hidden_exchange_time));
  tiles_.Increment(static_cast<double>(report.tiles));
  for (const KernelUse& use : report.kernels) {
    KernelCalls(use.call, use.kernel.family, use.kernel.kernel_class)
        .Increment(static_cast<double>(use.calls));
  }
  // Devices that do not copy have nothing to observe.
  if (upload_copies > absl::ZeroDuration()) h2d_.Observe(absl::ToDoubleSeconds(upload_copies));
  compute_.Observe(absl::ToDoubleSeconds(report.compute_time));
  ring_wait_.Observe(absl::ToDoubleSeconds(report.ring_wait_time));
  runs_.Add({{"code", "OK"}}).Increment();
}

void WorkerMetrics::CountDownloadCopies(absl::Duration time) {
  if (time > absl::ZeroDuration()) d2h_.Observe(absl::ToDoubleSeconds(time));
}

void WorkerMetrics::CountFailedRun(absl::StatusCode code) {
  runs_.Add({{"code", absl::StatusCodeToString(code)}}).Increment();
}

void WorkerMetrics::CountRefusedAttach(AttachCode code) {
  const char* reason = "other";
  switch (code) {
    case AttachCode::kNotUnderstood:
      reason = "not_understood";
      break;
    case AttachCode::kNoSuchToken:
      reason = "token";
      break;
    case AttachCode::kDescriptorRefused:
      reason = "descriptor";
      break;
    case AttachCode::kCannotMap:
      reason = "map";
      break;
    case AttachCode::kForeignUser:
      reason = "user";
      break;
    case AttachCode::kKindRefused:
      reason = "kind";
      break;
    case AttachCode::kDeviceOutOfReach:
      reason = "device";
      break;
    case AttachCode::kTooMuch:
      reason = "too_much";
      break;
    case AttachCode::kAttached:
    case AttachCode::kFenced:
      break;
  }
  refused_attaches_.Add({{"reason", reason}}).Increment();
}

}  // namespace ringattn::worker
