// A parser for the part of Prometheus' text format that processes export.
// Tests: metrics_collector_test.cc.
#ifndef RINGATTN_CLIENT_LOAD_PROMETHEUS_TEXT_H_
#define RINGATTN_CLIENT_LOAD_PROMETHEUS_TEXT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringattn::client::load {

struct MetricSample {
  std::string name;  // of a histogram with its _sum, _count, _bucket
  std::map<std::string, std::string> labels;
  double value = 0;
};

// Returns the samples in order, without comments and timestamps. INVALID_ARGUMENT, quoting the
// beginning of the line, for a malformed line.
absl::StatusOr<std::vector<MetricSample>> ParsePrometheusText(absl::string_view text);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_PROMETHEUS_TEXT_H_
