#include "server/core/requests/planning_cost.h"

#include <algorithm>

#include "common/layout/dilation.h"

namespace ringattn::server {
namespace {

// Estimates: the planner's bound assumes 100 ns per visit (kMaxPieceVisits); a factor of three
// allows for slower cores.
constexpr double kSecondsPerPlan = 2e-5;
constexpr double kSecondsPerVisit = 3e-7;
// A part of a dilated request has its own program on each rank.
constexpr double kSecondsPerPart = 5e-5;
// Number of candidates that the planner tries if the choice is free.
constexpr double kLayoutsTried = 3;
constexpr double kSchedulesTried = 2;
constexpr double kHostChoiceFactor = 3;

}  // namespace

double PlanningCostSeconds(const AttentionSpec& spec, const PlanChoice& choice,
                           const PlannerInputs& inputs) {
  const double world = std::max(1, choice.world_size.value_or(inputs.ready_workers));
  const double documents = static_cast<double>(std::max<int64_t>(1, PlannedDocuments(spec)));
  // Stripes split each part separately.
  const double parts = static_cast<double>(std::max<int64_t>(1, DilatedPartCount(spec.options)));
  const double tokens = static_cast<double>(std::max(spec.shape.seq_len_q, spec.shape.seq_len_kv));
  // Pieces of all shards: spans, split at documents. The planner visits each piece for every rank.
  double pieces = documents + 2 * world;
  if (choice.layout == Layout::kStriped) {
    pieces = choice.stripe == 1 ? documents * world
                                : documents + parts * tokens / static_cast<double>(choice.stripe);
  }
  // The planner also evaluates rings of half the hosts, of a quarter and so on, and the chosen one
  // again. Their cost decreases geometrically.
  const bool chooses_hosts = inputs.hosts.size() > 1 && !choice.world_size.has_value();
  // With few queries and many keys, the planner may also evaluate another schedule.
  const bool few_queries =
      !choice.schedule.has_value() && world > 1 && spec.shape.seq_len_q < spec.shape.seq_len_kv;
  const bool chooses = !choice.layout.has_value() && spec.shape.num_documents() > 1 && world > 1;
  return kSecondsPerPlan + kSecondsPerPart * (parts - 1) * world +
         kSecondsPerVisit * pieces * world * (chooses_hosts ? kHostChoiceFactor : 1) *
             ((chooses ? kLayoutsTried : 1) + (few_queries ? kSchedulesTried : 0));
}

}  // namespace ringattn::server
