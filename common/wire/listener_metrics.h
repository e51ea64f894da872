// ListenerMetrics: the connections of a process's listeners as metrics, labelled by listener.
#ifndef RINGATTN_COMMON_WIRE_LISTENER_METRICS_H_
#define RINGATTN_COMMON_WIRE_LISTENER_METRICS_H_

#include <string>
#include <utility>
#include <vector>

#include "common/observability/metrics.h"
#include "common/wire/grpc_1_51/listener.h"

namespace ringattn::wire {

// Used by one thread at a time.
class ListenerMetrics {
 public:
  using Listeners = std::vector<std::pair<std::string, Listener*>>;  // by name

  // Creates the series. `metrics` and the listeners must outlive this object.
  ListenerMetrics(Metrics* metrics, const Listeners& listeners);

  // Sets the series to the present values.
  void Update();

 private:
  struct Port {
    Listener* listener;
    prometheus::Gauge* connections;
    prometheus::Counter* refused;
    prometheus::Counter* failed_accepts;
    ListenerStats seen;  // values that the counters include already
  };

  std::vector<Port> ports_;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_LISTENER_METRICS_H_
