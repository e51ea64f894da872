#include "worker/service/reserve_decoder.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/limits.h"
#include "common/request/request_rules.h"
#include "common/wire/proto_values.h"

namespace ringattn::worker {
namespace {

// `field`: of Reserve.
absl::Status Malformed(absl::string_view field, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed Reserve: ", field, ": ", what));
}

// Returns the path in Reserve of a header's field.
std::string ReserveField(absl::string_view field) {
  if (field == "reply.lse_format") return "lse_per_document";
  if (field == "plan.world_size") return "members";
  if (!absl::ConsumePrefix(&field, "plan.")) absl::ConsumePrefix(&field, "reply.");
  return std::string(field);
}

// Returns the first violation; OK if there is none.
absl::Status StatusOf(Violations violations) {
  if (violations.empty()) return absl::OkStatus();
  const Rejection rejection = std::move(violations).ToRejection();
  const Violation& first = rejection.violations.front();
  return Malformed(ReserveField(first.field), first.description);
}

// Reads the generation ranks and returns this worker's ring rank.
absl::StatusOr<int> ReadMembers(const v1::Reserve& reserve, int rank, int world_size,
                                std::vector<int>* members) {
  int ring_rank = -1;
  for (uint32_t member : reserve.members()) {
    if (member >= static_cast<uint32_t>(world_size)) {
      return Malformed("members", absl::StrCat("has rank ", member, " of ", world_size));
    }
    if (std::find(members->begin(), members->end(), static_cast<int>(member)) != members->end()) {
      return Malformed("members", absl::StrCat("has rank ", member, " twice"));
    }
    if (static_cast<int>(member) == rank) ring_rank = static_cast<int>(members->size());
    members->push_back(static_cast<int>(member));
  }
  if (ring_rank < 0) return Malformed("members", "this worker is not among them");
  return ring_rank;
}

// The terms that Reserve states. A header may leave layout and schedule to the planner; a Reserve
// must not.
absl::StatusOr<ProgramTerms> ReadTerms(const v1::Reserve& reserve) {
  ProgramTerms terms;
  terms.direction = reserve.backward() ? Direction::kBackward : Direction::kForward;
  terms.recompute_forward = reserve.recompute_forward();
  terms.retains = reserve.retain();
  terms.reads_residual = !reserve.residual().empty();
  terms.layout = FromProto(reserve.layout());
  if (!terms.layout.has_value()) return Malformed("layout", "must be given");
  terms.schedule = FromProto(reserve.schedule());
  if (!terms.schedule.has_value()) return Malformed("schedule", "must be given");
  terms.world_size = reserve.members_size();
  terms.heads_per_step = reserve.heads_per_step();
  terms.group_size = reserve.group_size();
  if (terms.schedule == ScheduleKind::kDoubleRing && terms.group_size == 0) {
    return Malformed("group_size", "must be given");
  }
  return terms;
}

}  // namespace

absl::StatusOr<ReservedProgram> DecodeReserve(const v1::Reserve& reserve, int rank, int world_size,
                                              const std::vector<int>& hosts) {
  ReservedProgram result;
  const absl::StatusOr<int> ring_rank = ReadMembers(reserve, rank, world_size, &result.members);
  if (!ring_rank.ok()) return ring_rank.status();
  absl::StatusOr<ProgramTerms> terms = ReadTerms(reserve);
  if (!terms.ok()) return terms.status();
  // Zero means a default in a header. A Reserve has resolved it.
  if (reserve.shape().num_kv_heads() == 0 || reserve.shape().head_dim_v() == 0) {
    return Malformed("shape", "num_kv_heads and head_dim_v must be given");
  }

  // A coordinator's flags only lower the default limits.
  const Limits limits;
  Violations violations(limits.max_error_detail_bytes);
  int64_t stripe = 1;
  if (reserve.stripe() > 1)
    terms->stripe = stripe = ReadStripe(reserve.stripe(), limits, violations);
  result.spec =
      ReadSpec({terms->direction, reserve.shape(), reserve.dtype(), reserve.options(),
                reserve.probability_rows(), reserve.lse_per_document(), reserve.has_dlse()},
               limits, violations);
  result.spec.fp32_results = reserve.fp32_results();
  CheckProgram(*terms, result.spec, limits, violations);
  if (violations.empty()) {
    CheckTensorSizes(result.spec, terms->direction, ClientInputsOf(result.spec, *terms), limits,
                     violations);
  }
  if (absl::Status status = StatusOf(std::move(violations)); !status.ok()) return status;

  const ProgramRecipe recipe = {.schedule = *terms->schedule,
                                .layout = *terms->layout,
                                .stripe = stripe,
                                .direction = terms->direction,
                                .recompute_forward = terms->recompute_forward,
                                .keeps_inputs = terms->retains,
                                .heads_per_step = terms->heads_per_step,
                                .group_size = terms->group_size,
                                .tuning = FromProto(reserve.tuning())};
  result.plan = MakeShardPlan(result.spec, recipe, reserve.members_size());
  result.program = MakeProgram(result.spec, result.plan, recipe, *ring_rank);
  if (!hosts.empty()) {
    std::vector<int> host_of_member;
    for (int member : result.members) host_of_member.push_back(hosts[member]);
    AssignLanes(host_of_member, result.program);
  }
  return result;
}

}  // namespace ringattn::worker
