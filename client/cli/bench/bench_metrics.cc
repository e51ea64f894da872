#include "client/cli/bench/bench_metrics.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/cli/flag_set.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

using load::Figure;
using load::FigureKind;
using load::ScrapedFigures;

constexpr absl::Duration kScrapeTimeout = absl::Seconds(5);
// The default port of a coordinator's --metrics_listen.
constexpr char kCoordinatorPort[] = "7702";

constexpr Figure kCoordinatorFigures[] = {
    {"queue_depth_average", FigureKind::kAverage, "ringattn_queue_depth"},
    {"queue_depth_maximum", FigureKind::kMaximum, "ringattn_queue_depth"},
    {"active_requests_average", FigureKind::kAverage, "ringattn_active_requests"},
    {"requests_per_second", FigureKind::kRate, "ringattn_requests_total"},
    {"bytes_up_per_second", FigureKind::kRate, "ringattn_bytes_total", "direction", "up"},
    {"bytes_down_per_second", FigureKind::kRate, "ringattn_bytes_total", "direction", "down"},
    {"reserved_bytes_maximum", FigureKind::kMaximum, "ringattn_reserved_bytes"},
    {"resident_bytes_maximum", FigureKind::kMaximum, "ringattn_resident_bytes"},
};

// Fractions of time, from the times of programs that ended in the span. A long program therefore
// counts when it ends, and concurrent ones can exceed 1.
constexpr Figure kWorkerFigures[] = {
    {"compute_fraction", FigureKind::kRate, "ringattn_stage_duration_seconds_sum", "stage",
     "compute"},
    {"ring_wait_fraction", FigureKind::kRate, "ringattn_stage_duration_seconds_sum", "stage",
     "ring_wait"},
    {"h2d_fraction", FigureKind::kRate, "ringattn_stage_duration_seconds_sum", "stage", "h2d"},
    {"d2h_fraction", FigureKind::kRate, "ringattn_stage_duration_seconds_sum", "stage", "d2h"},
    {"exchange_fraction", FigureKind::kRate, "ringattn_exchange_seconds_total"},
    {"hidden_exchange_fraction", FigureKind::kRate, "ringattn_hidden_exchange_seconds_total"},
    {"flops_per_second", FigureKind::kRate, "ringattn_attention_flops_total"},
    {"tokens_per_second", FigureKind::kRate, "ringattn_worker_tokens_total"},
    {"ring_bytes_per_second", FigureKind::kRate, "ringattn_bytes_total", "direction", "ring"},
    {"reserved_bytes_maximum", FigureKind::kMaximum, "ringattn_worker_reserved_bytes"},
    {"residual_bytes_maximum", FigureKind::kMaximum, "ringattn_worker_residual_bytes"},
    {"device_memory_used_bytes_maximum", FigureKind::kMaximum, "ringattn_device_memory_used_bytes"},
    {"pinned_pool_used_bytes_maximum", FigureKind::kMaximum, "ringattn_pinned_pool_used_bytes"},
    {"resident_bytes_maximum", FigureKind::kMaximum, "ringattn_resident_bytes"},
};

std::vector<Figure> FiguresOf(bool is_worker) {
  if (is_worker) return {std::begin(kWorkerFigures), std::end(kWorkerFigures)};
  return {std::begin(kCoordinatorFigures), std::end(kCoordinatorFigures)};
}

// "12.3", or "-" if the value is unknown.
std::string Shown(const std::vector<Figure>& figures, const ScrapedFigures& scraped,
                  absl::string_view name, double unit) {
  for (size_t i = 0; i < figures.size(); ++i) {
    if (name != figures[i].name) continue;
    return scraped.values[i] ? absl::StrFormat("%.4g", *scraped.values[i] / unit) : "-";
  }
  return "-";
}

// Converts "queue_depth_average" to perf_analyzer's column title: "Queue Depth Average".
std::string Title(absl::string_view name) {
  std::string title(name);
  bool begins = true;
  for (char& letter : title) {
    if (letter == '_') letter = ' ';
    if (begins) letter = absl::ascii_toupper(letter);
    begins = letter == ' ';
  }
  return title;
}

absl::StatusOr<load::HttpUrl> UrlOf(const std::string& text) {
  auto url = load::ParseHttpUrl(text);
  if (!url.ok()) return UsageError(absl::StrCat("--metrics_url: ", url.status().message()));
  return url;
}

}  // namespace

void MetricsFlags::AddTo(FlagSet& command, const char* group) {
  command
      .Add("--collect_metrics,--collect-metrics", &collect,
           "Scrape the metrics of the coordinator and the workers during the windows, and report "
           "them with each level")
      .Group(group);
  command
      .Add("--metrics_url,--metrics-url", &urls,
           "URLs to scrape, http://HOST:PORT/metrics; default: port 7702 of --server's host, and "
           "the workers' own")
      .Delimiter(',')
      .Group(group);
  command
      .Add("--metrics_interval,--metrics-interval", &interval_ms,
           "Time between scrapes, a duration or milliseconds; at most half of "
           "--measurement_interval")
      .AsMilliseconds()
      .InRange(1.0, 3.6e6)
      .ShowDefault()
      .Group(group);
}

absl::StatusOr<BenchMetrics> BenchMetrics::Prepare(const MetricsFlags& flags,
                                                   const load::Measurement& measurement) {
  BenchMetrics metrics;
  metrics.interval_ = absl::Milliseconds(flags.interval_ms);
  if (2 * metrics.interval_ > measurement.interval) {
    return UsageError(absl::StrFormat(
        "--metrics_interval: %g ms are more than half of --measurement_interval, %g ms: a window "
        "needs two scrapes",
        flags.interval_ms, absl::ToDoubleMilliseconds(measurement.interval)));
  }
  std::set<std::string> known;
  for (const std::string& text : flags.urls) {
    auto url = UrlOf(text);
    if (!url.ok()) return url.status();
    if (!known.insert(url->ToString()).second) {
      return UsageError(absl::StrCat("--metrics_url: ", url->ToString(), " is given twice"));
    }
    metrics.urls_.push_back(*std::move(url));
  }
  return metrics;
}

absl::Status BenchMetrics::Describe(Endpoint& endpoint) const {
  const auto samples = load::FetchMetrics(endpoint.url, kScrapeTimeout);
  if (!samples.ok()) return samples.status();
  bool is_coordinator = false;
  for (const load::MetricSample& sample : *samples) {
    if (sample.name == "ringattn_queue_depth") is_coordinator = true;
    if (sample.name != "ringattn_worker_info") continue;
    endpoint.is_worker = true;
    const auto label = [&](const char* name) {
      const auto found = sample.labels.find(name);
      return found == sample.labels.end() ? std::string() : found->second;
    };
    endpoint.name = label("worker");
    endpoint.rank = label("rank");
    endpoint.device = label("device");
  }
  if (endpoint.is_worker) return absl::OkStatus();
  endpoint.name = "coordinator";
  if (is_coordinator) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      endpoint.url.ToString(), ": serves metrics of neither a coordinator nor a worker"));
}

absl::Status BenchMetrics::Find(Client& client, const std::string& server) {
  if (!urls_.empty()) {
    for (const load::HttpUrl& url : urls_) endpoints_.push_back({url});
  } else {
    auto url =
        UrlOf(absl::StrCat("http://", server.substr(0, server.rfind(':')), ":", kCoordinatorPort));
    if (!url.ok()) return url.status();
    endpoints_.push_back({*std::move(url)});
    const auto topology = client.GetTopology(kScrapeTimeout);
    if (!topology.ok()) return topology.status();
    for (const v1::WorkerInfo& worker : topology->workers()) {
      if (worker.metrics_address().empty()) {
        silent_.push_back(worker.name());
        continue;
      }
      auto of_worker = load::ParseHttpUrl(absl::StrCat("http://", worker.metrics_address()));
      if (!of_worker.ok()) return of_worker.status();
      endpoints_.push_back({*std::move(of_worker)});
    }
  }
  for (Endpoint& endpoint : endpoints_) {
    if (absl::Status status = Describe(endpoint); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("metrics of ", status.message()));
    }
  }
  return absl::OkStatus();
}

void BenchMetrics::Begin() {
  std::vector<load::MetricsCollector::Source> sources;
  for (const Endpoint& endpoint : endpoints_) {
    sources.push_back({endpoint.url, FiguresOf(endpoint.is_worker)});
  }
  collector_ = std::make_unique<load::MetricsCollector>(std::move(sources), interval_);
}

absl::StatusOr<LevelMetrics> BenchMetrics::End(const load::StableResult& measured) {
  LevelMetrics level;
  const auto& spans = measured.spans;
  if (!spans.empty()) level.whole = collector_->Between(spans.front().begin, spans.back().end);
  for (const load::TimeSpan& span : spans) {
    level.windows.push_back(collector_->Between(span.begin, span.end));
  }
  collector_.reset();
  for (size_t i = 0; i < level.whole.size(); ++i) {
    if (level.whole[i].scrapes > 0) continue;
    return absl::UnavailableError(absl::StrCat(
        "metrics of ", endpoints_[i].url.ToString(), ": none came during the level: ",
        level.whole[i].failed > 0 ? level.whole[i].last_failure : "the answers took too long"));
  }
  return level;
}

Json BenchMetrics::Figures(const Endpoint& endpoint, const ScrapedFigures& figures) const {
  Json values = {{"scrapes", figures.scrapes}, {"failed_scrapes", figures.failed}};
  const std::vector<Figure> names = FiguresOf(endpoint.is_worker);
  for (size_t i = 0; i < names.size(); ++i) {
    values[names[i].name] = figures.values[i] ? Json(*figures.values[i]) : Json(nullptr);
  }
  return values;
}

Json BenchMetrics::ToJson(const LevelMetrics& level) const {
  Json endpoints = Json::array();
  for (size_t i = 0; i < endpoints_.size(); ++i) {
    const Endpoint& endpoint = endpoints_[i];
    Json windows = Json::array();
    for (const auto& window : level.windows) windows.push_back(Figures(endpoint, window[i]));
    endpoints.push_back({{"name", endpoint.name},
                         {"url", endpoint.url.ToString()},
                         {"figures", Figures(endpoint, level.whole[i])},
                         {"windows", windows}});
  }
  return endpoints;
}

Json BenchMetrics::ToJson() const {
  Json endpoints = Json::array();
  for (const Endpoint& endpoint : endpoints_) {
    Json one = {{"name", endpoint.name},
                {"url", endpoint.url.ToString()},
                {"kind", endpoint.is_worker ? "worker" : "coordinator"}};
    if (endpoint.is_worker) one.update({{"rank", endpoint.rank}, {"device", endpoint.device}});
    endpoints.push_back(one);
  }
  return {{"interval_seconds", absl::ToDoubleSeconds(interval_)},
          {"endpoints", endpoints},
          {"workers_without_metrics", silent_}};
}

std::string BenchMetrics::TextHead() const {
  std::string text = absl::StrFormat("\nmetrics of the same windows, scraped every %g ms:\n",
                                     absl::ToDoubleMilliseconds(interval_));
  for (const std::string& name : silent_) {
    absl::StrAppend(&text, "  ", name, " exports none (--metrics_listen)\n");
  }
  return text;
}

std::string BenchMetrics::Text(const std::string& load, const LevelMetrics& level) const {
  std::string text;
  for (size_t i = 0; i < endpoints_.size(); ++i) {
    const Endpoint& endpoint = endpoints_[i];
    const std::vector<Figure> figures = FiguresOf(endpoint.is_worker);
    const auto shown = [&](absl::string_view name, double unit = 1) {
      return Shown(figures, level.whole[i], name, unit);
    };
    if (endpoint.is_worker) {
      absl::StrAppendFormat(
          &text,
          "%12s  %s, rank %s, %s: computes %s%%, waits for the ring %s%%, copies %s%% in, %s%% "
          "out, exchanges %s%% (hidden %s%%), %s GFLOP/s, ring %s GB/s; at most %s GB reserved, "
          "%s GB of the device, %s GB pinned, %s GB resident",
          load, endpoint.name, endpoint.rank, endpoint.device, shown("compute_fraction", 0.01),
          shown("ring_wait_fraction", 0.01), shown("h2d_fraction", 0.01),
          shown("d2h_fraction", 0.01), shown("exchange_fraction", 0.01),
          shown("hidden_exchange_fraction", 0.01), shown("flops_per_second", 1e9),
          shown("ring_bytes_per_second", 1e9), shown("reserved_bytes_maximum", 1e9),
          shown("device_memory_used_bytes_maximum", 1e9),
          shown("pinned_pool_used_bytes_maximum", 1e9), shown("resident_bytes_maximum", 1e9));
    } else {
      absl::StrAppendFormat(
          &text,
          "%12s  %s: queue %s (at most %s), %s in flight, %s requests/s, %s GB/s up, %s down; at "
          "most %s GB reserved, %s GB resident",
          load, endpoint.name, shown("queue_depth_average"), shown("queue_depth_maximum"),
          shown("active_requests_average"), shown("requests_per_second"),
          shown("bytes_up_per_second", 1e9), shown("bytes_down_per_second", 1e9),
          shown("reserved_bytes_maximum", 1e9), shown("resident_bytes_maximum", 1e9));
    }
    if (level.whole[i].failed > 0) {
      absl::StrAppendFormat(&text, "; %d of %d scrapes failed: %s", level.whole[i].failed,
                            level.whole[i].failed + level.whole[i].scrapes,
                            level.whole[i].last_failure);
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string BenchMetrics::CsvHead() const {
  std::string head;
  for (const bool is_worker : {false, true}) {
    for (const Figure& figure : FiguresOf(is_worker)) {
      absl::StrAppend(&head, ",", is_worker ? "Worker " : "Coordinator ", Title(figure.name));
    }
  }
  return head;
}

std::string BenchMetrics::CsvCells(const LevelMetrics& level) const {
  std::string cells;
  for (const bool is_worker : {false, true}) {
    const std::vector<Figure> figures = FiguresOf(is_worker);
    for (size_t at = 0; at < figures.size(); ++at) {
      absl::StrAppend(&cells, ",");
      for (size_t i = 0; i < endpoints_.size(); ++i) {
        if (endpoints_[i].is_worker != is_worker || !level.whole[i].values[at]) continue;
        // The operator chooses worker names, so remove the separators of this file format.
        const std::string name =
            absl::StrReplaceAll(endpoints_[i].name, {{",", "_"}, {";", "_"}, {"\"", "_"}});
        absl::StrAppendFormat(&cells, "%s:%.9g;", name, *level.whole[i].values[at]);
      }
    }
  }
  return cells;
}

}  // namespace ringattn::client::cli
