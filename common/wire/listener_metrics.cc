#include "common/wire/listener_metrics.h"

namespace ringattn::wire {

ListenerMetrics::ListenerMetrics(Metrics* metrics, const Listeners& listeners) {
  auto& connections =
      metrics->Gauges("ringattn_open_connections", "Open connections, by listener.");
  auto& refused =
      metrics->Counters("ringattn_refused_connections_total",
                        "Connections refused because the listener's bound was reached.");
  auto& failed =
      metrics->Counters("ringattn_failed_accepts_total",
                        "Failures to accept a connection, for lack of descriptors or memory.");
  for (const auto& [name, listener] : listeners) {
    const prometheus::Labels labels = {{"listener", name}};
    ports_.push_back(
        {listener, &connections.Add(labels), &refused.Add(labels), &failed.Add(labels), {}});
  }
}

void ListenerMetrics::Update() {
  for (Port& port : ports_) {
    const ListenerStats stats = port.listener->Stats();
    port.connections->Set(static_cast<double>(stats.open));
    port.refused->Increment(static_cast<double>(stats.refused - port.seen.refused));
    port.failed_accepts->Increment(
        static_cast<double>(stats.failed_accepts - port.seen.failed_accepts));
    port.seen = stats;
  }
}

}  // namespace ringattn::wire
