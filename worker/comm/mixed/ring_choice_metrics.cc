#include "worker/comm/mixed/ring_choice_metrics.h"

#include <string>
#include <utility>
#include <vector>

namespace ringattn::worker {

void ExportRingChoice(Metrics* metrics, std::shared_ptr<const LastNetworkEngine> last) {
  auto& family = metrics->Gauges("ringattn_worker_ring_network",
                                 "1 for what carries the ring's bytes between workers that share "
                                 "no memory; none: no two workers need it.");
  std::vector<std::pair<NetworkEngine, prometheus::Gauge*>> gauges;
  for (const NetworkEngine engine :
       {NetworkEngine::kNone, NetworkEngine::kNccl, NetworkEngine::kWire}) {
    gauges.emplace_back(engine, &family.Add({{"engine", std::string(NetworkName(engine))}}));
  }
  metrics->OnScrape([last = std::move(last), gauges] {
    const NetworkEngine now = last->load();
    for (const auto& [engine, gauge] : gauges) gauge->Set(engine == now ? 1 : 0);
  });
}

}  // namespace ringattn::worker
