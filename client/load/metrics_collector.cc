#include "client/load/metrics_collector.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client::load {
namespace {

// A slower endpoint is useless for a measurement.
constexpr absl::Duration kScrapeTimeout = absl::Seconds(5);

bool IsOf(const Figure& figure, const MetricSample& sample) {
  if (sample.name != figure.metric) return false;
  if (figure.label == nullptr) return true;
  const auto found = sample.labels.find(figure.label);
  return found != sample.labels.end() && found->second == figure.label_value;
}

// Returns the growth of a counter over the scrapes. A value below its predecessor belongs to a
// restarted process.
double Growth(const std::vector<double>& values) {
  double growth = 0;
  for (size_t i = 1; i < values.size(); ++i) {
    growth += values[i] >= values[i - 1] ? values[i] - values[i - 1] : values[i];
  }
  return growth;
}

}  // namespace

Scrape ScrapeOf(absl::Span<const Figure> figures, absl::Span<const MetricSample> samples,
                absl::Time at) {
  Scrape scrape{at, std::vector<std::optional<double>>(figures.size())};
  for (const MetricSample& sample : samples) {
    for (size_t i = 0; i < figures.size(); ++i) {
      if (IsOf(figures[i], sample)) {
        scrape.values[i] = scrape.values[i].value_or(0) + sample.value;
      }
    }
  }
  return scrape;
}

std::vector<std::optional<double>> SummariseScrapes(absl::Span<const Figure> figures,
                                                    absl::Span<const Scrape> scrapes,
                                                    absl::Time begin, absl::Time end) {
  std::vector<std::optional<double>> summary(figures.size());
  for (size_t i = 0; i < figures.size(); ++i) {
    std::vector<double> inside, counted;
    absl::Time first = absl::InfiniteFuture(), last = absl::InfinitePast();
    for (const Scrape& scrape : scrapes) {
      if (scrape.at > end || !scrape.values[i].has_value()) continue;
      if (scrape.at <= begin) counted.clear();
      if (counted.empty()) first = scrape.at;
      counted.push_back(*scrape.values[i]);
      last = scrape.at;
      if (scrape.at >= begin) inside.push_back(*scrape.values[i]);
    }
    if (figures[i].kind == FigureKind::kRate) {
      const double seconds = absl::ToDoubleSeconds(last - first);
      if (counted.size() > 1 && seconds > 0) summary[i] = Growth(counted) / seconds;
    } else if (!inside.empty()) {
      double sum = 0;
      for (double value : inside) sum += value;
      summary[i] = figures[i].kind == FigureKind::kMaximum
                       ? *std::max_element(inside.begin(), inside.end())
                       : sum / static_cast<double>(inside.size());
    }
  }
  return summary;
}

absl::StatusOr<std::vector<MetricSample>> FetchMetrics(const HttpUrl& url, absl::Duration timeout) {
  const absl::StatusOr<std::string> page = HttpGet(url, timeout);
  if (!page.ok()) return page.status();
  auto samples = ParsePrometheusText(*page);
  if (samples.ok()) return samples;
  return absl::FailedPreconditionError(
      absl::StrCat(url.ToString(), ": ", samples.status().message()));
}

MetricsCollector::MetricsCollector(std::vector<Source> sources, absl::Duration interval)
    : sources_(std::move(sources)), interval_(interval), logs_(sources_.size()) {
  for (size_t i = 0; i < sources_.size(); ++i) {
    threads_.emplace_back([this, i] { Work(i); });
  }
}

MetricsCollector::~MetricsCollector() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void MetricsCollector::Work(size_t source) {
  const auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
  absl::Time due = MonotonicNow();
  while (true) {
    const absl::Time begun = MonotonicNow();
    const auto samples = FetchMetrics(sources_[source].url, kScrapeTimeout);
    // The values are of the moment at which the page was created; halfway is the best estimate.
    const absl::Time at = begun + (MonotonicNow() - begun) / 2;
    // After a slow answer the next scrape is due at once; missed scrapes are not made up for.
    due = std::max(due + interval_, MonotonicNow());
    absl::MutexLock lock(&mutex_);
    Log& log = logs_[source];
    if (samples.ok()) {
      log.scrapes.push_back(ScrapeOf(sources_[source].figures, *samples, at));
    } else {
      log.failures.push_back({at, std::string(samples.status().message())});
    }
    if (AwaitUntil(mutex_, absl::Condition(&stopping), due)) return;
  }
}

std::vector<ScrapedFigures> MetricsCollector::Between(absl::Time begin, absl::Time end) const {
  std::vector<ScrapedFigures> all;
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < sources_.size(); ++i) {
    ScrapedFigures one;
    for (const Scrape& scrape : logs_[i].scrapes) {
      if (scrape.at >= begin && scrape.at <= end) ++one.scrapes;
    }
    for (const Failure& failure : logs_[i].failures) {
      if (failure.at < begin || failure.at > end) continue;
      ++one.failed;
      one.last_failure = failure.what;
    }
    one.values = SummariseScrapes(sources_[i].figures, logs_[i].scrapes, begin, end);
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace ringattn::client::load
