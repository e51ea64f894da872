// The worker's Prometheus metrics.
#ifndef RINGATTN_WORKER_SERVICE_WORKER_METRICS_H_
#define RINGATTN_WORKER_SERVICE_WORKER_METRICS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/local_memory/attach_protocol.h"
#include "common/observability/metrics.h"
#include "common/security/security_metrics.h"
#include "common/wire/listener_metrics.h"
#include "worker/device/device.h"
#include "worker/direct/direct_streams.h"
#include "worker/executor/executor.h"
#include "worker/operation/kept_operations.h"

namespace ringattn::worker {

// Thread safe.
class WorkerMetrics {
 public:
  WorkerMetrics();

  // Sets the labels of ringattn_worker_info, which identify this process. Call once, before
  // anything else.
  void Describe(const std::string& worker, const std::string& device, const std::string& version,
                int64_t memory_limit_bytes);
  // Creates the series of kernels that serve common calls, so that they start at zero.
  void ExpectKernels(const std::vector<ServedCalls>& served);
  // Sets the rank in the current ring, or none outside a ring.
  void SetRank(std::optional<int> rank);

  // Serves metrics. Returns "host:port" as bound, or UNAVAILABLE if the address cannot be bound.
  absl::StatusOr<std::string> Serve(const std::string& listen) { return metrics_.Serve(listen); }
  std::string Text() const { return metrics_.Text(); }

  // Exports the certificates of the link to the coordinator. Call once.
  void ExportTls(const TransportSecurity& security) {
    ringattn::ExportTls(&metrics_, "cluster", security);
  }
  // Lets another component add its metrics, which must not be those of this class.
  void Export(const std::function<void(Metrics*)>& add) { add(&metrics_); }
  // Exports the connections of these listeners. They must outlive the calls of UpdateListeners.
  // Call once, before UpdateListeners.
  void ExportListeners(const wire::ListenerMetrics::Listeners& listeners) {
    absl::MutexLock lock(&mutex_);
    listeners_.emplace(&metrics_, listeners);
  }
  void UpdateListeners() {
    absl::MutexLock lock(&mutex_);
    listeners_->Update();
  }
  void SetGeneration(uint64_t generation) { generation_.Set(static_cast<double>(generation)); }
  void SetResidentBytes(int64_t bytes) { resident_bytes_.Set(static_cast<double>(bytes)); }
  void SetReservedBytes(int64_t bytes) { reserved_bytes_.Set(static_cast<double>(bytes)); }
  void SetResiduals(int64_t count, int64_t bytes) {
    residuals_.Set(static_cast<double>(count));
    residual_bytes_.Set(static_cast<double>(bytes));
  }
  // Call from one thread.
  // Counts a Reserve with prepare_only. `found`: an equal operation existed already.
  void CountPreparation(bool found) {
    (found ? preparations_found_ : preparations_made_).Increment();
  }
  void SetKeptOperations(const KeptOperations::Stats& stats);
  void SetKvCaches(int64_t count, int64_t bytes) {
    kv_caches_.Set(static_cast<double>(count));
    kv_cache_bytes_.Set(static_cast<double>(bytes));
  }
  void CountKvStep() { kv_steps_.Increment(); }
  void CountKvCall(absl::Duration time) { kv_calls_.Observe(absl::ToDoubleSeconds(time)); }
  // `reason`: of ErrorInfo or RowRefusal; empty counts as "other".
  void CountKvRefusal(const std::string& reason);
  void SetStepRings(int64_t rings) { step_rings_.Set(static_cast<double>(rings)); }
  // A wait for a request in a step ring has ended.
  void CountStepRingRequest(bool slept) {
    (slept ? ring_requests_asleep_ : ring_requests_active_).Increment();
  }
  void SetDeviceUsage(const DeviceUsage& usage) {
    device_used_bytes_.Set(static_cast<double>(usage.memory_used_bytes));
    allocated_bytes_.Set(static_cast<double>(usage.allocated_bytes));
    pinned_used_bytes_.Set(static_cast<double>(usage.staging_used_bytes));
  }
  void CountReceived(int64_t bytes) { received_bytes_.Increment(static_cast<double>(bytes)); }
  void CountSent(int64_t bytes) { sent_bytes_.Increment(static_cast<double>(bytes)); }
  // Bytes copied from and to clients' host memory.
  void CountCopiedIn(int64_t bytes) { copied_in_bytes_.Increment(static_cast<double>(bytes)); }
  void CountCopiedOut(int64_t bytes) { copied_out_bytes_.Increment(static_cast<double>(bytes)); }
  // The same for CUDA memory.
  void CountImportedIn(int64_t bytes) { imported_in_bytes_.Increment(static_cast<double>(bytes)); }
  void CountImportedOut(int64_t bytes) {
    imported_out_bytes_.Increment(static_cast<double>(bytes));
  }
  // Bytes received and sent on direct streams.
  void CountDirectIn(int64_t bytes) { direct_in_bytes_.Increment(static_cast<double>(bytes)); }
  void CountDirectOut(int64_t bytes) { direct_out_bytes_.Increment(static_cast<double>(bytes)); }
  void CountRefusedStream(StreamRefusal refusal);
  void SetRegions(size_t regions) { regions_.Set(static_cast<double>(regions)); }
  void SetPinnedBytes(int64_t bytes) { pinned_bytes_.Set(static_cast<double>(bytes)); }
  void SetImportedBytes(int64_t bytes) { imported_bytes_.Set(static_cast<double>(bytes)); }
  void CountRefusedAttach(AttachCode code);
  // Counts one program that ended successfully. `upload_copies`: time of copying its inputs to the
  // device.
  void CountRun(const Operation& operation, const ExecutionReport& report,
                absl::Duration upload_copies);
  // Counts copying one set of outputs from the device.
  void CountDownloadCopies(absl::Duration time);
  // Counts a preemption of a running program. `paused`: zero if the device runs both at once.
  void CountPreemption(absl::Duration paused) {
    preemptions_.Increment();
    paused_seconds_.Increment(absl::ToDoubleSeconds(paused));
  }
  // Counts a program that failed: "CANCELLED", "UNAVAILABLE", ...
  void CountFailedRun(absl::StatusCode code);

 private:
  prometheus::Counter& KernelCalls(std::string_view call, std::string_view family,
                                   std::string_view kernel_class);

  Metrics metrics_;
  prometheus::Family<prometheus::Gauge>& info_;
  absl::Mutex mutex_;
  std::string worker_ ABSL_GUARDED_BY(mutex_);
  std::string device_ ABSL_GUARDED_BY(mutex_);
  std::optional<wire::ListenerMetrics> listeners_ ABSL_GUARDED_BY(mutex_);
  prometheus::Gauge* current_info_ ABSL_GUARDED_BY(mutex_) =
      nullptr;  // the series of info_ that is 1
  prometheus::Gauge& generation_;
  prometheus::Gauge& memory_limit_bytes_;
  prometheus::Gauge& resident_bytes_;
  prometheus::Gauge& reserved_bytes_;
  prometheus::Gauge& residuals_;
  prometheus::Gauge& residual_bytes_;
  prometheus::Gauge& kept_operations_;
  prometheus::Gauge& kept_bytes_;
  prometheus::Gauge& held_recipes_;
  prometheus::Family<prometheus::Counter>& preparations_;
  prometheus::Counter& preparations_made_;
  prometheus::Counter& preparations_found_;
  prometheus::Family<prometheus::Counter>& kept_lookups_;
  prometheus::Counter& kept_hits_;
  prometheus::Counter& kept_misses_;
  prometheus::Family<prometheus::Counter>& kept_drops_;
  prometheus::Counter& kept_evictions_;
  prometheus::Counter& kept_expiries_;
  prometheus::Gauge& kv_caches_;
  prometheus::Gauge& kv_cache_bytes_;
  prometheus::Counter& kv_steps_;
  prometheus::Histogram& kv_calls_;
  prometheus::Family<prometheus::Counter>& kv_refusals_;
  prometheus::Gauge& step_rings_;
  prometheus::Family<prometheus::Counter>& ring_requests_;
  prometheus::Counter& ring_requests_active_;
  prometheus::Counter& ring_requests_asleep_;
  prometheus::Gauge& device_used_bytes_;
  prometheus::Gauge& allocated_bytes_;
  prometheus::Gauge& pinned_used_bytes_;
  prometheus::Gauge& achieved_flops_;
  prometheus::Counter& received_bytes_;
  prometheus::Counter& sent_bytes_;
  prometheus::Counter& copied_in_bytes_;
  prometheus::Counter& copied_out_bytes_;
  prometheus::Counter& imported_in_bytes_;
  prometheus::Counter& imported_out_bytes_;
  prometheus::Counter& direct_in_bytes_;
  prometheus::Counter& direct_out_bytes_;
  prometheus::Family<prometheus::Counter>& refused_streams_;
  prometheus::Gauge& regions_;
  prometheus::Gauge& pinned_bytes_;
  prometheus::Gauge& imported_bytes_;
  prometheus::Family<prometheus::Counter>& refused_attaches_;
  prometheus::Counter& flops_;
  prometheus::Counter& tokens_;
  prometheus::Counter& tiles_;
  prometheus::Family<prometheus::Counter>& kernel_calls_;
  prometheus::Counter& exchange_seconds_;
  prometheus::Counter& hidden_exchange_seconds_;
  prometheus::Histogram& h2d_;
  prometheus::Histogram& compute_;
  prometheus::Histogram& ring_wait_;
  prometheus::Histogram& d2h_;
  prometheus::Family<prometheus::Counter>& runs_;
  prometheus::Counter& preemptions_;
  prometheus::Counter& paused_seconds_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_WORKER_METRICS_H_
