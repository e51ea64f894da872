// Metrics of one process: a registry and the path that Prometheus scrapes. Names, labels and help
// texts that both the coordinator and the workers export are defined here, so that they agree.
//
//   Metrics metrics;
//   auto& requests = metrics.Counters("ringattn_requests_total", "Requests that ended.");
//   requests.Add({{"method", "Forward"}, {"code", "OK"}}).Increment();
//   absl::StatusOr<std::string> address = metrics.Serve("127.0.0.1:0");
#ifndef RINGATTN_COMMON_OBSERVABILITY_METRICS_H_
#define RINGATTN_COMMON_OBSERVABILITY_METRICS_H_

#include <functional>
#include <memory>
#include <string>

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "absl/status/statusor.h"
#include "common/observability/http_server.h"

namespace ringattn {

// Families live as long as the Metrics. Thread safe.
class Metrics {
 public:
  Metrics();
  ~Metrics();

  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // REQUIRES: a legal Prometheus name; each name has one kind of metric.
  prometheus::Family<prometheus::Counter>& Counters(const std::string& name,
                                                    const std::string& help);
  prometheus::Family<prometheus::Gauge>& Gauges(const std::string& name, const std::string& help);
  prometheus::Family<prometheus::Histogram>& Histograms(const std::string& name,
                                                        const std::string& help);

  // Serves /metrics, and `more`, at "host:port" until destruction; port 0 picks a free one. Returns
  // "host:port" as bound. Call once. Errors: UNAVAILABLE if it cannot bind.
  absl::StatusOr<std::string> Serve(const std::string& listen, HttpRoutes more = {});
  // After it returns, no route is running or will run.
  void StopServing() { server_.reset(); }

  // Calls `refresh` before each scrape, one call at a time, for values that are computed on demand.
  // It must not block, and everything it refers to must outlive the Metrics.
  void OnScrape(std::function<void()> refresh);

  // Returns the text of a scrape in Prometheus' text format.
  std::string Text() const;

 private:
  class Refreshed;  // the registry with refresh callbacks

  std::shared_ptr<prometheus::Registry> registry_;
  std::shared_ptr<Refreshed> refreshed_;
  std::unique_ptr<HttpServer> server_;
};

// --- Metrics that several processes export -----------------------------------

// ringattn_stage_duration_seconds{stage}: queue, upload, compute and download at the coordinator;
// h2d, compute, ring_wait and d2h at a worker.
prometheus::Family<prometheus::Histogram>& StageDurations(Metrics& metrics);
// 1 ms to 17 minutes, each four times the previous one.
prometheus::Histogram::BucketBoundaries StageBuckets();

// Exports ringattn_build_info{version} and ringattn_start_time_seconds.
void DescribeProcess(Metrics& metrics, const std::string& version);

// ringattn_bytes_total{direction, transport}: tensor payload. direction is up (towards the
// workers), down, or ring; transport is relay, tcp, ...
prometheus::Family<prometheus::Counter>& TensorBytes(Metrics& metrics);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_OBSERVABILITY_METRICS_H_
