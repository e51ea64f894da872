#include "server/edge/access/callers.h"

#include <utility>

#include "common/observability/log.h"
#include "common/security/principal.h"
#include "common/security/security_metrics.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {

Callers::Callers(const ClientDirectory* directory, const Limits& limits, Metrics* metrics)
    : directory_(directory),
      limits_(limits),
      failures_(metrics->Counters(
          "ringattn_auth_failures_total",
          "Calls rejected because the caller is not in the clients file, by reason.")),
      requests_(metrics->Counters("ringattn_client_requests_total",
                                  "Forward and Backward calls that ended, by client and status "
                                  "code.")) {
  if (directory_ == nullptr) return;
  for (const char* reason : kAuthFailureReasons) failures_.Add({{"reason", reason}});
  ReloadCounters reloads(&metrics->Counters("ringattn_clients_file_reloads_total",
                                            "Reloads of the clients file; refused: "
                                            "invalid, the previous one stays in force."),
                         {});
  prometheus::Gauge* known =
      &metrics->Gauges("ringattn_known_clients", "Clients in the clients file.").Add({});
  metrics->OnScrape([directory, reloads, known]() mutable {
    const DirectoryStats stats = directory->stats();
    reloads.Set(stats.reloads, stats.refused_reloads);
    known->Set(static_cast<double>(stats.clients));
  });
}

std::variant<Caller, grpc::Status> Callers::Identify(const grpc::CallbackServerContext& call) {
  Caller caller;
  caller.connection = call.peer();
  if (directory_ == nullptr) {
    caller.principal = PrincipalOf(call).id();
    caller.client = caller.principal.empty() ? caller.connection : caller.principal;
    return caller;
  }
  auto who = directory_->Identify(call.client_metadata(), call.auth_context().get());
  if (const auto* failure = std::get_if<Failure>(&who)) {
    Refused(*failure, caller.connection);
    return ToGrpcStatus(*failure, limits_);
  }
  KnownClient& client = std::get<KnownClient>(who);
  caller.principal = caller.client = std::move(client.name);
  caller.terms = client.terms;
  return caller;
}

void Callers::Refused(const Failure& failure, const std::string& peer) {
  failures_.Add({{"reason", failure.reason}}).Increment();
  LogWarning("a call of an unknown client was rejected",
             {{"reason", failure.reason}, {"peer", peer}, {"why", failure.message}});
}

void Callers::CountRequest(const Caller& caller, const char* code) {
  std::string label = caller.principal.empty() ? "anonymous" : caller.principal;
  absl::MutexLock lock(&mutex_);
  if (labels_.size() < kMaxLabels) {
    labels_.insert(label);
  } else if (labels_.count(label) == 0) {
    label = "other";
  }
  prometheus::Counter*& counter = counters_[{label, code}];
  if (counter == nullptr) counter = &requests_.Add({{"client", label}, {"code", code}});
  counter->Increment();
}

}  // namespace ringattn::server
