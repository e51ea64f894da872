#include "common/schedule/ring_forward.h"

#include <utility>

namespace ringattn {
namespace {

// Adds the transfers of the visits' K/V blocks. A ring of kNoRank records only their steps.
void FetchBlocks(RingRank& ring, int64_t first_step, const Visits& visits) {
  const KvRoute& route = ring.route;
  for (int step : visits) {
    if (step == 0) continue;  // the own block
    const RingVisit& visit = route.visits[step];
    for (int source : ring.SourcesAt(step, {})) {
      for (const RowRange& rows : route.Held(step, source)) {
        ring.FetchKv(first_step + visit.fetch_begin, first_step + visit.fetch_end + 1, source, step,
                     rows);
      }
    }
  }
}

}  // namespace

void UseRingForward(RingRank& ring, int64_t first_step) {
  const KvRoute& route = ring.route;
  FetchBlocks(ring, first_step, route.AllVisits());
  for (int step = 0; step < route.steps(); ++step) {
    for (int source = 0; source < route.world_size; ++source) {
      if (!route.SeesAny(step, source)) continue;
      ring.builder.Use(first_step + step);
      break;
    }
  }
  // A rank with queries that see no key has a call in the first step.
  for (int rank = 0; rank < route.world_size; ++rank) {
    bool sees_any = false;
    for (int step = 0; step < route.steps() && !sees_any; ++step) {
      sees_any = route.SeesAny(step, route.SourceOf(rank, step));
    }
    if (!sees_any && route.q_rows[rank] > 0) ring.builder.Use(first_step);
  }
}

int64_t AddRingForward(RingRank& ring, int64_t first_step, const RingPart& part) {
  const KvRoute& route = ring.route;
  FetchBlocks(ring, first_step, part.forward_fetches);
  CallsAt calls;
  for (int step : part.forward_calls) {
    ComputeCall call;
    const int source = route.SourceOf(ring.rank(), step);
    for (const RowRange& rows : route.Held(step, source)) {
      const WorkCount work = ring.WorkAt(step, rows);
      if (work.pairs > 0) AddOperand(call, ring.Keys(step, rows), work);
    }
    if (!call.kv.empty()) calls.emplace_back(first_step + step, std::move(call));
  }
  AddForwardCalls(std::move(calls), first_step, ring.shard, ring.builder, part.other_calls);
  return route.steps();
}

}  // namespace ringattn
