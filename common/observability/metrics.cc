#include "common/observability/metrics.h"

#include <utility>
#include <vector>

#include <prometheus/collectable.h>
#include <prometheus/text_serializer.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ringattn {

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

absl::StatusOr<std::string> Metrics::Serve(const std::string& listen, HttpRoutes more) {
  more["/metrics"] = [this] {
    return HttpReply{.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = Text()};
  };
  absl::StatusOr<std::unique_ptr<HttpServer>> server = HttpServer::Start(listen, std::move(more));
  if (!server.ok()) return server.status();
  server_ = *std::move(server);
  return server_->address();
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

void DescribeProcess(Metrics& metrics, const std::string& version) {
  metrics.Gauges("ringattn_build_info", "1; its label says which version this process is.")
      .Add({{"version", version}})
      .Set(1);
  metrics
      .Gauges("ringattn_start_time_seconds", "When this process started, in seconds of Unix time.")
      .Add({})
      .Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

prometheus::Family<prometheus::Counter>& TensorBytes(Metrics& metrics) {
  return metrics.Counters("ringattn_bytes_total",
                          "Tensor payload bytes by direction and transport.");
}

}  // namespace ringattn
