// MetricsCollector: scrapes the metrics of processes repeatedly during a load, and summarises them
// over a time span.
// Tests: metrics_collector_test.cc.
#ifndef RINGATTN_CLIENT_LOAD_METRICS_COLLECTOR_H_
#define RINGATTN_CLIENT_LOAD_METRICS_COLLECTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/load/http_get.h"
#include "client/load/prometheus_text.h"

namespace ringattn::client::load {

enum class FigureKind {
  kRate,     // of a counter: its growth per second
  kAverage,  // of a gauge
  kMaximum,  // of a gauge
};

// How to summarise a metric: over all its samples, or over those with a given label value.
struct Figure {
  const char* name;
  FigureKind kind;
  const char* metric;
  const char* label = nullptr;
  const char* label_value = nullptr;
};

// One scrape: for each figure the sum of the metric's samples, or nothing if there are none.
struct Scrape {
  absl::Time at;
  std::vector<std::optional<double>> values;
};

// The figures of one endpoint between `begin` and `end`.
struct ScrapedFigures {
  int scrapes = 0;
  int failed = 0;
  std::string last_failure;
  // By figure. A rate covers the time from the last scrape before `begin`, or else the first one in
  // the span, to the last one in the span. A counter that restarts counts from 0. Nothing: the
  // endpoint has no such metric, or was not scraped often enough.
  std::vector<std::optional<double>> values;
};

// Pure. `scrapes` are in order of time.
std::vector<std::optional<double>> SummariseScrapes(absl::Span<const Figure> figures,
                                                    absl::Span<const Scrape> scrapes,
                                                    absl::Time begin, absl::Time end);

// Sums the samples by figure. Pure.
Scrape ScrapeOf(absl::Span<const Figure> figures, absl::Span<const MetricSample> samples,
                absl::Time at);

// Fetches and parses one endpoint's page. Errors: HttpGet's, and FAILED_PRECONDITION, with the URL,
// for a page that is not in Prometheus' format.
absl::StatusOr<std::vector<MetricSample>> FetchMetrics(const HttpUrl& url, absl::Duration timeout);

// Thread safe.
class MetricsCollector {
 public:
  struct Source {
    HttpUrl url;
    std::vector<Figure> figures;
  };

  // Scrapes each source at once and then every `interval`, on a thread per source.
  MetricsCollector(std::vector<Source> sources, absl::Duration interval);
  // Waits for scrapes in flight.
  ~MetricsCollector();

  MetricsCollector(const MetricsCollector&) = delete;
  MetricsCollector& operator=(const MetricsCollector&) = delete;

  // In the order of the sources.
  std::vector<ScrapedFigures> Between(absl::Time begin, absl::Time end) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Failure {
    absl::Time at;
    std::string what;
  };
  struct Log {
    std::vector<Scrape> scrapes;
    std::vector<Failure> failures;
  };

  void Work(size_t source) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::vector<Source> sources_;
  const absl::Duration interval_;
  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Log> logs_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last, because they use the others
};

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_METRICS_COLLECTOR_H_
