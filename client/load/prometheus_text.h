// Prometheus' text format, as far as reading what processes export takes it.
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

// The samples, in their order; comments and times are left out. INVALID_ARGUMENT for a line that is
// none of the format's, quoting its beginning.
absl::StatusOr<std::vector<MetricSample>> ParsePrometheusText(absl::string_view text);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_PROMETHEUS_TEXT_H_
