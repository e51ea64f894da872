#include "server/core/requests/planning_cost.h"

#include <algorithm>

#include "common/layout/dilation.h"

namespace ringattn::server {
namespace {

// Estimates, not measurements: the planner's own bound counts 100 ns a visit
// (kMaxPieceVisits), and three times that leaves room for slower cores.
constexpr double kSecondsPerPlan = 2e-5;
constexpr double kSecondsPerVisit = 3e-7;
// Where the layout is the planner's to choose, it tries so many.
constexpr double kLayoutsTried = 3;
constexpr double kSchedulesTried = 2;

}  // namespace

double PlanningCostSeconds(const AttentionSpec& spec, const PlanChoice& choice,
                           const PlannerInputs& inputs) {
  const double world = std::max(1, choice.world_size.value_or(inputs.ready_workers));
  const double documents = static_cast<double>(std::max<int64_t>(1, PlannedDocuments(spec)));
  // Each is cut by the stripes anew.
  const double parts = static_cast<double>(std::max<int64_t>(1, DilatedPartCount(spec.options)));
  const double tokens = static_cast<double>(std::max(spec.shape.seq_len_q, spec.shape.seq_len_kv));
  // Pieces of all shards: spans, cut at documents. Every rank is planned against them.
  double pieces = documents + 2 * world;
  if (choice.layout == Layout::kStriped) {
    pieces = choice.stripe == 1 ? documents * world
                                : documents + parts * tokens / static_cast<double>(choice.stripe);
  }
  // Few queries of many keys: it may try another schedule, and compare.
  const bool few_queries =
      !choice.schedule.has_value() && world > 1 && spec.shape.seq_len_q < spec.shape.seq_len_kv;
  const bool chooses = !choice.layout.has_value() && spec.shape.num_documents() > 1 && world > 1;
  return kSecondsPerPlan +
         kSecondsPerVisit * pieces * world *
             ((chooses ? kLayoutsTried : 1) + (few_queries ? kSchedulesTried : 0));
}

}  // namespace ringattn::server
