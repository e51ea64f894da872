#include "common/security/security_metrics.h"

#include <utility>

#include "absl/time/time.h"

namespace ringattn {
namespace {

prometheus::Labels With(prometheus::Labels labels, const char* result) {
  labels["result"] = result;
  return labels;
}

}  // namespace

ReloadCounters::ReloadCounters(prometheus::Family<prometheus::Counter>* family,
                               const prometheus::Labels& labels)
    : ok_(&family->Add(With(labels, "ok"))), refused_(&family->Add(With(labels, "refused"))) {}

void ReloadCounters::Set(int64_t reloads, int64_t refused) {
  ok_->Increment(static_cast<double>(reloads) - ok_->Value());
  refused_->Increment(static_cast<double>(refused) - refused_->Value());
}

void ExportTls(Metrics* metrics, const std::string& link, const TransportSecurity& security) {
  if (security.is_plain()) return;
  prometheus::Gauge* expiry =
      &metrics
           ->Gauges("ringattn_tls_certificate_expiry_timestamp_seconds",
                    "When the first certificate of this process's chain expires.")
           .Add({{"link", link}});
  ReloadCounters reloads(&metrics->Counters("ringattn_tls_reloads_total",
                                            "TLS files that were replaced; refused: the old ones "
                                            "stay in force."),
                         {{"link", link}});
  metrics->OnScrape([security, expiry, reloads]() mutable {
    const TlsState state = *security.state();
    expiry->Set(static_cast<double>(absl::ToUnixSeconds(state.expires)));
    reloads.Set(state.reloads, state.refused_reloads);
  });
}

}  // namespace ringattn
