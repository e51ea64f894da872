// What Prometheus is told of a process's TLS.
#ifndef RINGATTN_COMMON_SECURITY_SECURITY_METRICS_H_
#define RINGATTN_COMMON_SECURITY_SECURITY_METRICS_H_

#include <string>

#include "common/observability/metrics.h"
#include "common/security/credentials.h"

namespace ringattn {

// Of the link "clients" or "cluster", nothing if it speaks plain text:
//   ringattn_tls_certificate_expiry_timestamp_seconds{link}   Unix time
//   ringattn_tls_reloads_total{link, result}                  result: ok, refused
// As they are when they are asked for.
void ExportTls(Metrics* metrics, const std::string& link, const TransportSecurity& security);

// Reloads of any file by what came of them; "the series exist from the start" included.
class ReloadCounters {
 public:
  ReloadCounters(prometheus::Family<prometheus::Counter>* family, const prometheus::Labels& labels);
  // Totals since the start. Not thread safe.
  void Set(int64_t reloads, int64_t refused);

 private:
  prometheus::Counter* ok_;
  prometheus::Counter* refused_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_SECURITY_METRICS_H_
