// Exports the state of a process's TLS to Prometheus.
#ifndef RINGATTN_COMMON_SECURITY_SECURITY_METRICS_H_
#define RINGATTN_COMMON_SECURITY_SECURITY_METRICS_H_

#include <string>

#include "common/observability/metrics.h"
#include "common/security/credentials.h"

namespace ringattn {

// Exports for the link "clients" or "cluster", unless it is plain text:
//   ringattn_tls_certificate_expiry_timestamp_seconds{link}   Unix time
//   ringattn_tls_reloads_total{link, result}                  result: ok, refused
// Values are read at each scrape.
void ExportTls(Metrics* metrics, const std::string& link, const TransportSecurity& security);

// Counts the reloads of a file by result. Both series exist from the start.
class ReloadCounters {
 public:
  ReloadCounters(prometheus::Family<prometheus::Counter>* family, const prometheus::Labels& labels);
  // Sets the totals since the start. Not thread safe.
  void Set(int64_t reloads, int64_t refused);

 private:
  prometheus::Counter* ok_;
  prometheus::Counter* refused_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_SECURITY_METRICS_H_
