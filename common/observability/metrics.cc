#include "common/observability/metrics.h"

#include <exception>
#include <utility>
#include <vector>

#include <prometheus/collectable.h>
#include <prometheus/text_serializer.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace ringattn {
namespace {

// A connection has this long for its whole request and occupies a thread meanwhile. With
// the library's defaults, 30 s and two threads, two silent ones kept everybody else out.
constexpr char kRequestTimeoutMs[] = "500";
constexpr char kThreads[] = "16";  // they sleep

}  // namespace

class Metrics::Refreshed : public prometheus::Collectable {
 public:
  explicit Refreshed(std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)) {}

  void Add(std::function<void()> refresh) {
    absl::MutexLock lock(&mutex_);
    refreshers_.push_back(std::move(refresh));
  }

  std::vector<prometheus::MetricFamily> Collect() const override {
    {
      absl::MutexLock lock(&mutex_);
      for (const std::function<void()>& refresh : refreshers_) refresh();
    }
    return registry_->Collect();
  }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  mutable absl::Mutex mutex_;
  std::vector<std::function<void()>> refreshers_ ABSL_GUARDED_BY(mutex_);
};

Metrics::Metrics()
    : registry_(std::make_shared<prometheus::Registry>()),
      refreshed_(std::make_shared<Refreshed>(registry_)) {}
Metrics::~Metrics() = default;

prometheus::Family<prometheus::Counter>& Metrics::Counters(const std::string& name,
                                                           const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry_);
}

prometheus::Family<prometheus::Gauge>& Metrics::Gauges(const std::string& name,
                                                       const std::string& help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry_);
}

prometheus::Family<prometheus::Histogram>& Metrics::Histograms(const std::string& name,
                                                               const std::string& help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_);
}

absl::StatusOr<std::string> Metrics::Serve(const std::string& listen) {
  // The library reports a failed bind by an exception.
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", listen, "num_threads", kThreads, "request_timeout_ms", kRequestTimeoutMs,
        "enable_keep_alive", "no"});
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("metrics: cannot listen on ", listen));
  }
  exposer_->RegisterCollectable(refreshed_);
  const std::vector<int> ports = exposer_->GetListeningPorts();
  if (ports.empty()) return absl::UnavailableError(absl::StrCat("metrics: no port at ", listen));
  return absl::StrCat(listen.substr(0, listen.rfind(':')), ":", ports[0]);
}

void Metrics::OnScrape(std::function<void()> refresh) { refreshed_->Add(std::move(refresh)); }

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(refreshed_->Collect());
}

prometheus::Family<prometheus::Histogram>& StageDurations(Metrics& metrics) {
  return metrics.Histograms("ringattn_stage_duration_seconds",
                            "Time that requests spent in each stage.");
}

prometheus::Histogram::BucketBoundaries StageBuckets() {
  prometheus::Histogram::BucketBoundaries bounds;
  for (double bound = 1e-3; bound < 1100; bound *= 4) bounds.push_back(bound);
  return bounds;
}

prometheus::Family<prometheus::Counter>& TensorBytes(Metrics& metrics) {
  return metrics.Counters("ringattn_bytes_total",
                          "Tensor payload bytes by direction and transport.");
}

}  // namespace ringattn
