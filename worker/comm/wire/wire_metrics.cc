#include "worker/comm/wire/wire_metrics.h"

#include <string>
#include <utility>
#include <vector>

namespace ringattn::worker {
namespace {

void SetTotal(prometheus::Counter* counter, const std::atomic<int64_t>& total) {
  counter->Increment(static_cast<double>(total.load(std::memory_order_relaxed)) - counter->Value());
}

using ReasonCounters = std::vector<std::pair<size_t, prometheus::Counter*>>;

// Creates a series for every reason except those that cannot occur.
ReasonCounters AddReasons(prometheus::Family<prometheus::Counter>& family,
                          const std::vector<WireFailure>& impossible) {
  ReasonCounters counters;
  for (size_t i = 0; i < kWireFailureNames.size(); ++i) {
    bool occurs = true;
    for (const WireFailure failure : impossible) occurs &= i != static_cast<size_t>(failure);
    if (!occurs) continue;
    counters.emplace_back(i, &family.Add({{"reason", std::string(kWireFailureNames[i])}}));
  }
  return counters;
}

}  // namespace

void ExportWire(Metrics* metrics, std::shared_ptr<const WireCounters> counters) {
  auto& bytes = metrics->Counters("ringattn_worker_wire_bytes_total",
                                  "Bytes of transfers over sockets between workers.");
  prometheus::Counter* const out = &bytes.Add({{"direction", "out"}});
  prometheus::Counter* const in = &bytes.Add({{"direction", "in"}});
  prometheus::Gauge* const connections =
      &metrics->Gauges("ringattn_worker_wire_connections", "Open connections to other workers.")
           .Add({});
  prometheus::Counter* const retries =
      &metrics
           ->Counters("ringattn_worker_wire_retries_total",
                      "Connections to other workers that were made again while a ring formed.")
           .Add({});
  const ReasonCounters lost = AddReasons(
      metrics->Counters("ringattn_worker_wire_lost_peers_total",
                        "Other workers whose connections ended within a ring, by reason."),
      {WireFailure::kNone, WireFailure::kToken, WireFailure::kLimit});
  const ReasonCounters refused = AddReasons(
      metrics->Counters("ringattn_worker_wire_refused_total",
                        "Incoming connections that did not belong to the ring, by reason."),
      {WireFailure::kNone, WireFailure::kSizes});
  metrics->OnScrape([counters = std::move(counters), out, in, connections, retries, lost, refused] {
    SetTotal(out, counters->sent_bytes);
    SetTotal(in, counters->received_bytes);
    SetTotal(retries, counters->retries);
    connections->Set(static_cast<double>(counters->connections.load(std::memory_order_relaxed)));
    for (const auto& [reason, counter] : lost) SetTotal(counter, counters->lost_peers[reason]);
    for (const auto& [reason, counter] : refused) SetTotal(counter, counters->refused[reason]);
  });
}

}  // namespace ringattn::worker
