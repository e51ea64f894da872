#include "common/plan/planner.h"

#include <algorithm>
#include <cassert>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/counted.h"
#include "common/layout/dilation.h"
#include "common/plan/cost_model.h"
#include "common/plan/host_rings.h"
#include "common/schedule/schedule.h"

namespace ringattn {
namespace {

int64_t LongerAxis(const AttentionSpec& spec) {
  return spec.shape.batch * std::max(spec.shape.seq_len_q, spec.shape.seq_len_kv);
}

// Returns the bytes of the bias, the mask and the gradient that the request has. Saturates.
int64_t PairTensorBytes(const AttentionSpec& spec) {
  int64_t bytes = 0;
  for (TensorId id : {TensorId::kBias, TensorId::kDbias, TensorId::kMask}) {
    if (InfoOf(id).is_present(spec)) bytes += BytesOf(spec, id);
  }
  return bytes;
}

// A ring of more hosts must be predicted to take at most this part of the time of one of fewer
// hosts. Rates vary by several percent between measurements, and workers of further hosts can serve
// other requests.
constexpr double kWorthwhileHosts = 0.92;

struct RingSize {
  int world_size = 1;
  std::string reason;
  // Set if the planner chose the size: why one device does not serve the request. It may then
  // choose a ring of fewer hosts.
  std::optional<std::string> why_many;
};

// Returns the size of a ring of all workers. `how` follows the reason on one host.
RingSize AllWorkers(const PlannerInputs& inputs, std::string why_many, const std::string& how) {
  RingSize size{inputs.ready_workers,
                absl::StrCat(why_many, how, "over all ", inputs.ready_workers, " workers")};
  size.why_many = std::move(why_many);
  return size;
}

std::string HeadsText(const PlanChoice& choice) {
  if (choice.heads_per_step == 0) return "";
  return absl::StrCat(choice.heads_per_step, " kv ", choice.heads_per_step == 1 ? "head" : "heads",
                      " at a time, ");
}

absl::StatusOr<RingSize> ChooseRingSize(const AttentionSpec& spec, const PlanChoice& choice,
                                        const PlannerInputs& inputs) {
  if (inputs.ready_workers < 1) return absl::UnavailableError("no worker is ready");
  if (choice.world_size.has_value()) {
    const int requested = *choice.world_size;
    if (choice.schedule == ScheduleKind::kSingle && requested > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "plan.world_size: is ", requested, ", but plan.schedule single runs on one device"));
    }
    if (requested > inputs.ready_workers) {
      return absl::FailedPreconditionError(
          absl::StrCat("plan.world_size: is ", requested, ", but only ", inputs.ready_workers,
                       inputs.ready_workers == 1 ? " worker is ready" : " workers are ready"));
    }
    if (choice.heads_per_step != 0 && requested > 1) {
      return RingSize{requested, absl::StrCat("all_gather, ", HeadsText(choice), "over ", requested,
                                              " workers, as requested")};
    }
    return RingSize{requested, absl::StrCat("ring size ", requested, " as requested")};
  }
  if (choice.schedule == ScheduleKind::kSingle) return RingSize{1, "one device as requested"};
  if (inputs.ready_workers == 1) return RingSize{1, "only one worker is ready"};
  if (choice.schedule.has_value()) {
    return AllWorkers(inputs, absl::StrCat(ScheduleKindName(*choice.schedule), " as requested"),
                      absl::StrCat(", ", HeadsText(choice)));
  }
  const int64_t tokens = LongerAxis(spec);
  // A bias or a mask grows with the square of the tokens, so the token count does not bound memory.
  const int64_t pair_bytes = PairTensorBytes(spec);
  if (pair_bytes > kSingleDevicePairBytes) {
    return AllWorkers(
        inputs,
        absl::StrCat("a bias or mask of ", pair_bytes, " bytes exceeds the single-device limit of ",
                     kSingleDevicePairBytes),
        ": ring ");
  }
  if (tokens <= inputs.single_device_threshold_tokens) {
    return RingSize{1, absl::StrCat(tokens, tokens == 1 ? " token is" : " tokens are",
                                    " within the single-device threshold of ",
                                    inputs.single_device_threshold_tokens)};
  }
  return AllWorkers(
      inputs,
      absl::StrCat(tokens, tokens == 1 ? " token exceeds" : " tokens exceed",
                   " the single-device threshold of ", inputs.single_device_threshold_tokens),
      ": ring ");
}

// Returns whether the window is bounded on both sides and shorter than a shard.
bool HasShortWindow(const AttentionSpec& spec, int world_size) {
  if (!spec.shape.document_rules.empty()) return false;  // each document has its own rule
  const AttentionOptions& options = spec.options;
  const int64_t shard_rows = spec.shape.seq_len_kv / world_size;
  if (options.window_left < 0 || options.window_left >= shard_rows) return false;
  if (options.causal) return true;
  return options.window_right >= 0 && options.window_right < shard_rows - options.window_left;
}

// Returns whether all levels' segments fit a shard. Then work is balanced and ranks exchange
// little.
bool HasShortSegments(const AttentionSpec& spec, int world_size) {
  const std::vector<DilationLevel>& levels = spec.options.dilation_levels;
  const int64_t shard_rows = spec.shape.seq_len_kv / world_size;
  return !levels.empty() && std::all_of(levels.begin(), levels.end(), [&](const auto& level) {
    return level.segment_length <= shard_rows;
  });
}

// REQUIRES: striped.
absl::Status CheckPieces(const AttentionSpec& spec, int world_size, int64_t stripe) {
  const int64_t tokens = std::max(spec.shape.seq_len_q, spec.shape.seq_len_kv);
  const int64_t documents = spec.shape.num_documents();
  // Stripes of one token form one strided span per rank, which every document divides.
  const int64_t stripes = stripe == 1 ? 0 : tokens / stripe + (tokens % stripe != 0 ? 1 : 0);
  if (stripes > kMaxStripes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "plan.stripe: stripes of %d divide %d tokens into %d stripes, the limit is %d: choose "
        "longer stripes, or 1",
        stripe, tokens, stripes, kMaxStripes));
  }
  int64_t pieces = stripe == 1 ? world_size * documents : stripes + documents - 1;
  for (const DilationLevel& level : spec.options.dilation_levels) {
    AttentionOptions alone;
    alone.dilation_levels = {level};
    const int64_t segments = SegmentCount(spec.shape, level);
    pieces += (stripe == 1 ? world_size * segments : stripes + segments) * DilatedPartCount(alone);
  }
  if (pieces > kMaxPieceVisits / world_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "plan.stripe: stripes of %d over %d ranks divide %d documents into %d pieces, the limit "
        "for "
        "this ring size is %d: choose longer stripes, another layout or fewer ranks",
        stripe, world_size, documents, pieces, kMaxPieceVisits / world_size));
  }
  return absl::OkStatus();
}

struct Candidate {
  Plan plan;
  std::string why;
};

// Returns the group size of a double ring that the client requests.
absl::StatusOr<int64_t> GroupSize(const PlanChoice& choice, const std::vector<int>& host_of_rank,
                                  int world_size) {
  if (choice.group_size != 0) {
    if (world_size % choice.group_size == 0) return choice.group_size;
    return absl::InvalidArgumentError(absl::StrCat("plan.group_size: is ", choice.group_size,
                                                   ": must divide the ring size, ", world_size));
  }
  const int64_t size = RanksPerHost(host_of_rank, world_size);
  if (size > 0) return size;
  return absl::FailedPreconditionError(
      "plan.schedule: is double_ring, but the members' hosts have different numbers of members, or "
      "are not neighbours in the ring: set plan.group_size, or use ring");
}

// Returns the recipe of a choice with this layout on this ring size.
//   group_size  of a double ring
ProgramRecipe RecipeFor(const PlanChoice& choice, Direction direction, Layout layout,
                        int world_size, int64_t group_size) {
  ProgramRecipe recipe;
  recipe.schedule =
      world_size == 1 ? ScheduleKind::kSingle : choice.schedule.value_or(ScheduleKind::kRing);
  recipe.layout = layout;
  recipe.stripe = layout == Layout::kStriped ? choice.stripe : 1;
  recipe.direction = direction;
  recipe.recompute_forward = choice.recompute_forward;
  recipe.keeps_inputs = choice.keeps_inputs;
  recipe.heads_per_step = recipe.schedule == ScheduleKind::kAllGather ? choice.heads_per_step : 0;
  if (recipe.schedule == ScheduleKind::kDoubleRing) recipe.group_size = group_size;
  recipe.tuning = choice.tuning;
  return recipe;
}

absl::StatusOr<Candidate> Describe(const AttentionSpec& spec, Direction direction,
                                   const PlanChoice& choice, const PlannerInputs& inputs,
                                   Layout layout, int world_size, std::string why,
                                   const PlanControl& control) {
  const std::vector<int> host_of_rank = HostOfEachRank(inputs, world_size);
  absl::StatusOr<int64_t> group_size = 0;
  if (choice.schedule == ScheduleKind::kDoubleRing && world_size > 1) {
    group_size = GroupSize(choice, host_of_rank, world_size);
    if (!group_size.ok()) return group_size.status();
  }
  const ProgramRecipe recipe = RecipeFor(choice, direction, layout, world_size, *group_size);
  ShardPlan shards = MakeShardPlan(spec, recipe, world_size);
  CostSum costs(spec, inputs, host_of_rank);
  ScheduleBuilder builder(spec, shards, recipe, control.cancelled);
  const std::unique_ptr<const ClassedPrograms> classes = builder.FindStepClasses(host_of_rank);
  if (classes != nullptr && !builder.cancelled()) {
    costs.AddAll(*classes);
  } else {
    // Build one program at a time; the plan keeps only sums.
    for (int rank = 0; rank < world_size && !builder.cancelled(); ++rank) {
      Program program = builder.MakeProgram(rank);
      AssignLanes(host_of_rank, program);
      costs.Add(program);
    }
  }
  if (builder.cancelled()) return absl::CancelledError("planning was cancelled");
  return Candidate{std::move(costs).Finish(recipe, std::move(shards)), std::move(why)};
}

absl::StatusOr<Candidate> ChooseLayout(const AttentionSpec& spec, Direction direction,
                                       const PlanChoice& choice, const PlannerInputs& inputs,
                                       int world_size, const PlanControl& control) {
  const auto describe_with = [&](const PlannerInputs& rates, Layout layout, std::string why) {
    return Describe(spec, direction, choice, rates, layout, world_size, std::move(why), control);
  };
  const auto describe = [&](Layout layout, std::string why) {
    return describe_with(inputs, layout, std::move(why));
  };
  if (choice.layout.has_value()) {
    return describe(*choice.layout, absl::StrCat(LayoutName(*choice.layout), " as requested"));
  }
  if (world_size == 1) return describe(Layout::kContiguous, "");
  if (HasShortWindow(spec, world_size)) {
    return describe(Layout::kContiguous, "contiguous, because the window is shorter than a shard");
  }
  if (HasShortSegments(spec, world_size)) {
    return describe(Layout::kContiguous, "contiguous, because dilated segments fit a shard");
  }
  const std::vector<MaskRule>& rules = spec.shape.document_rules;
  const bool causal =
      spec.options.causal ||
      std::any_of(rules.begin(), rules.end(), [](const MaskRule& rule) { return rule.causal; });
  if (!causal) {
    return describe(Layout::kContiguous,
                    "contiguous, because without causality all rows cost the same");
  }
  if (spec.shape.num_documents() <= 1) {
    return describe(Layout::kZigzag, "zigzag, which balances causal work");
  }
  // Packed documents may balance causal work without zigzag and then need few neighbours. Or they
  // are so long and uneven that each needs its own zigzag. The cost model decides. For a
  // deterministic request it uses no measured rate.
  const bool nominal = spec.options.deterministic;
  std::vector<Candidate> candidates;
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kZigzagPerDocument}) {
    absl::StatusOr<Candidate> candidate =
        describe_with(nominal ? PlannerInputs() : inputs, layout, "");
    if (!candidate.ok()) return candidate.status();
    candidates.push_back(*std::move(candidate));
  }
  const auto seconds = [](const Candidate& candidate) {
    return candidate.plan.predicted_compute_seconds;
  };
  // With equal costs the earlier candidate wins; it is the simpler one.
  Candidate& winner = *std::min_element(
      candidates.begin(), candidates.end(),
      [&](const Candidate& a, const Candidate& b) { return seconds(a) < seconds(b); });
  std::string others;
  for (const Candidate& candidate : candidates) {
    if (&candidate == &winner) continue;
    absl::StrAppendFormat(&others, "%s%.3g s %s", others.empty() ? "" : " and ", seconds(candidate),
                          LayoutName(candidate.plan.shards.layout));
  }
  winner.why =
      absl::StrFormat("%s, predicted %.3g s against %s for these documents%s",
                      LayoutName(winner.plan.shards.layout), seconds(winner), others,
                      nominal ? " at nominal rates, because the request is deterministic" : "");
  if (!nominal) return std::move(winner);
  return describe(winner.plan.shards.layout, winner.why);
}

// Return the bytes of a query row and of a key row, with all tensors that travel with them.
double BytesOfQueryRow(const AttentionSpec& spec, Direction direction, bool recompute_forward) {
  const AttentionShape& shape = spec.shape;
  const double element = static_cast<double>(ElementBytes(spec.dtype));
  const double dim = static_cast<double>(shape.head_dim);
  const double dim_v = static_cast<double>(shape.head_dim_v);
  double bytes = 0;  // per head
  if (direction == Direction::kForward || recompute_forward) bytes += dim * element + dim_v * 4 + 4;
  if (direction == Direction::kBackward) bytes += (dim + dim_v) * element + 8 + dim * 4;
  return bytes * static_cast<double>(shape.num_heads);
}

double BytesOfKeyRow(const AttentionSpec& spec, Direction direction, bool recompute_forward) {
  const AttentionShape& shape = spec.shape;
  const double dims = static_cast<double>(shape.head_dim + shape.head_dim_v);
  const double element = static_cast<double>(ElementBytes(spec.dtype));
  double bytes = 0;
  if (direction == Direction::kForward || recompute_forward) bytes += dims * element;
  if (direction == Direction::kBackward) bytes += dims * (element + 4);
  return bytes * static_cast<double>(shape.num_kv_heads);
}

// Returns whether pass_q may win: few queries with many keys, so that the queries travel in fewer
// bytes than the keys.
bool MayPassQueries(const AttentionSpec& spec, Direction direction, const PlanChoice& choice,
                    int world_size) {
  if (choice.schedule.has_value() || world_size == 1) return false;
  if (spec.options.bias.has_value() || spec.options.mask.has_value()) return false;
  if (!spec.probability_rows.empty()) return false;
  const AttentionShape& shape = spec.shape;
  return shape.seq_len_q < shape.seq_len_kv &&
         static_cast<double>(shape.seq_len_q) *
                 BytesOfQueryRow(spec, direction, choice.recompute_forward) <
             static_cast<double>(shape.seq_len_kv) *
                 BytesOfKeyRow(spec, direction, choice.recompute_forward);
}

// Returns the ring's candidate, or pass_q over the same shards if it is predicted to be faster.
// Never chooses all_gather or replicated_q: they save per-step overhead but need memory for the
// whole of an axis on every device.
absl::StatusOr<Candidate> ChooseSchedule(const AttentionSpec& spec, Direction direction,
                                         const PlanChoice& choice, const PlannerInputs& inputs,
                                         Candidate ring, const PlanControl& control) {
  const ShardPlan& shards = ring.plan.shards;
  if (!MayPassQueries(spec, direction, choice, shards.world_size)) return ring;
  const auto describe = [&](ScheduleKind kind, const PlannerInputs& rates) {
    PlanChoice forced = choice;
    forced.schedule = kind;
    return Describe(spec, direction, forced, rates, shards.layout, shards.world_size, ring.why,
                    control);
  };
  const bool nominal = spec.options.deterministic;
  const PlannerInputs rates = nominal ? PlannerInputs() : inputs;
  absl::StatusOr<Candidate> passing = describe(ScheduleKind::kPassQ, rates);
  if (!passing.ok()) return passing.status();
  double ring_seconds = ring.plan.busiest_rank_seconds;
  if (nominal) {
    const absl::StatusOr<Candidate> same = describe(ScheduleKind::kRing, rates);
    if (!same.ok()) return same.status();
    ring_seconds = same->plan.busiest_rank_seconds;
  }
  const double seconds = passing->plan.busiest_rank_seconds;
  if (seconds >= ring_seconds) return ring;
  if (nominal) passing = describe(ScheduleKind::kPassQ, inputs);
  if (!passing.ok()) return passing.status();
  absl::StrAppendFormat(
      &passing->why,
      "%spass_q, predicted %.3g s on the busiest rank against %.3g s with K/V travelling%s",
      passing->why.empty() ? "" : "; ", seconds, ring_seconds,
      nominal ? " at nominal rates, because the request is deterministic" : "");
  return passing;
}

// Returns the flat ring's candidate, or a double ring over the same shards if the ring spans hosts
// with equally many members and that is predicted to be faster. A deterministic request keeps the
// flat ring, because the schedule decides the order of additions and rates vary.
absl::StatusOr<Candidate> ChooseDoubleRing(const AttentionSpec& spec, Direction direction,
                                           const PlanChoice& choice, const PlannerInputs& inputs,
                                           Candidate ring, const PlanControl& control) {
  const int world_size = ring.plan.shards.world_size;
  if (choice.schedule.has_value() || spec.options.deterministic ||
      ring.plan.recipe.schedule != ScheduleKind::kRing) {
    return ring;
  }
  const int64_t group_size = RanksPerHost(HostOfEachRank(inputs, world_size), world_size);
  if (group_size < 2 || group_size == world_size) return ring;
  PlanChoice forced = choice;
  forced.schedule = ScheduleKind::kDoubleRing;
  absl::StatusOr<Candidate> twofold = Describe(
      spec, direction, forced, inputs, ring.plan.shards.layout, world_size, ring.why, control);
  if (!twofold.ok()) return twofold.status();
  const double seconds = twofold->plan.predicted_compute_seconds;
  if (seconds >= ring.plan.predicted_compute_seconds) return ring;
  absl::StrAppendFormat(&twofold->why,
                        "%sdouble_ring in groups of %d, predicted %.3g s against %.3g s in one "
                        "ring",
                        twofold->why.empty() ? "" : "; ", group_size, seconds,
                        ring.plan.predicted_compute_seconds);
  return twofold;
}

// Plans for a ring of this size.
absl::StatusOr<Candidate> PlanRing(const AttentionSpec& spec, Direction direction,
                                   const PlanChoice& choice, const PlannerInputs& inputs,
                                   int world_size, const PlanControl& control) {
  if (choice.layout == Layout::kStriped && world_size > 1) {
    const absl::Status status = CheckPieces(spec, world_size, choice.stripe);
    if (!status.ok()) return status;
  }
  absl::StatusOr<Candidate> chosen =
      ChooseLayout(spec, direction, choice, inputs, world_size, control);
  if (!chosen.ok()) return chosen.status();
  chosen = ChooseSchedule(spec, direction, choice, inputs, *std::move(chosen), control);
  if (!chosen.ok()) return chosen.status();
  return ChooseDoubleRing(spec, direction, choice, inputs, *std::move(chosen), control);
}

// "8 workers on 2 of 3 hosts"
std::string RingText(const HostRing& ring, const PlannerInputs& inputs) {
  const int hosts = static_cast<int>(inputs.hosts.size());
  if (ring.hosts == hosts) {
    return absl::StrCat("all ", ring.workers, " workers on ", Counted(hosts, "host"));
  }
  return absl::StrCat(Counted(ring.workers, "worker"), " on ", ring.hosts, " of ", hosts, " hosts");
}

// A ring of whole hosts, and why it was chosen.
struct ChosenHosts {
  HostRing ring;
  std::optional<Candidate> plan;  // if it was made with the figures of all hosts
  std::string reason;
  bool may_grow = false;
};

// Plans a request for each of these rings, up to the first whose shards have too many pieces.
absl::StatusOr<std::vector<Candidate>> PlanRings(const AttentionSpec& spec, Direction direction,
                                                 const PlanChoice& choice,
                                                 const std::vector<HostRing>& rings,
                                                 const PlanControl& control) {
  std::vector<Candidate> plans;
  for (const HostRing& ring : rings) {
    absl::StatusOr<Candidate> plan =
        PlanRing(spec, direction, choice, ring.inputs, ring.workers, control);
    if (absl::IsInvalidArgument(plan.status()) && !plans.empty()) break;
    if (!plan.ok()) return plan.status();
    plans.push_back(*std::move(plan));
  }
  return plans;
}

// Returns the ring with the shortest predicted time, where more hosts must be worthwhile.
size_t BestOf(const std::vector<Candidate>& plans) {
  size_t best = 0;
  for (size_t i = 1; i < plans.size(); ++i) {
    if (plans[i].plan.predicted_compute_seconds <
        kWorthwhileHosts * plans[best].plan.predicted_compute_seconds) {
      best = i;
    }
  }
  return best;
}

// ", predicted 0.2 s against 0.3 s on 1 host and 0.25 s on 4 hosts, with 1e+09 bytes/s between ..."
std::string PredictionsText(const std::vector<HostRing>& rings, const std::vector<Candidate>& plans,
                            size_t best, const PlannerInputs& inputs) {
  std::vector<std::string> others;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (i == best) continue;
    others.push_back(absl::StrFormat("%.3g s on %s", plans[i].plan.predicted_compute_seconds,
                                     Counted(rings[i].hosts, "host")));
  }
  if (others.empty()) return "";
  const std::string together =
      inputs.host_total_bytes_per_s > inputs.host_link_bytes_per_s
          ? absl::StrFormat(" and %.3g from all workers of a host", inputs.host_total_bytes_per_s)
          : "";
  return absl::StrFormat(", predicted %.3g s against %s, with %.3g bytes/s between hosts%s (%s)",
                         plans[best].plan.predicted_compute_seconds, absl::StrJoin(others, " and "),
                         inputs.host_link_bytes_per_s, together,
                         inputs.host_link_measured ? "measured" : "assumed");
}

// Chooses the hosts of a request by the predicted time. The hosts of a deterministic request do not
// depend on rates: it gets the first ring.
absl::StatusOr<ChosenHosts> ChooseHosts(const AttentionSpec& spec, Direction direction,
                                        const PlanChoice& choice, const PlannerInputs& inputs,
                                        const std::string& why_many, const PlanControl& control) {
  const bool deterministic = spec.options.deterministic;
  const std::vector<HostRing> rings =
      RingsOfWholeHosts(inputs, deterministic, choice.min_world_size);
  std::vector<Candidate> plans;
  if (!deterministic && rings.size() > 1) {
    absl::StatusOr<std::vector<Candidate>> planned =
        PlanRings(spec, direction, choice, rings, control);
    if (!planned.ok()) return planned.status();
    plans = *std::move(planned);
  }
  const size_t best = BestOf(plans);
  ChosenHosts chosen{rings[best]};
  chosen.may_grow = best + 1 < rings.size();
  chosen.reason = absl::StrCat(why_many, ": ring over ", RingText(rings[best], inputs),
                               PredictionsText(rings, plans, best, inputs));
  if (deterministic && chosen.may_grow) {
    absl::StrAppend(&chosen.reason,
                    ", because the hosts of a deterministic request do not depend on rates");
  }
  if (choice.min_world_size > 0) {
    absl::StrAppend(&chosen.reason, "; rings of fewer than ", choice.min_world_size,
                    " workers lack the memory");
  }
  if (best < plans.size() && !rings[best].has_own_figures) {
    chosen.plan = std::move(plans[best]);
  }
  return chosen;
}

// ", with 2 links between hosts"
std::string HostLinksText(const std::vector<int>& host_of_rank) {
  int links = 0;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    links += host_of_rank[rank] != host_of_rank[(rank + 1) % host_of_rank.size()];
  }
  return links == 0 ? "" : absl::StrCat(", with ", Counted(links, "link"), " between hosts");
}

}  // namespace

absl::StatusOr<Plan> PlanRequest(const AttentionSpec& spec, Direction direction,
                                 const PlanChoice& choice, const PlannerInputs& inputs,
                                 const PlanControl& control) {
  absl::StatusOr<RingSize> size = ChooseRingSize(spec, choice, inputs);
  if (!size.ok()) return size.status();
  std::optional<Candidate> known;
  bool may_grow = false;
  if (size->why_many.has_value() && inputs.hosts.size() > 1) {
    absl::StatusOr<ChosenHosts> hosts =
        ChooseHosts(spec, direction, choice, inputs, *size->why_many, control);
    if (!hosts.ok()) return hosts.status();
    size->world_size = hosts->ring.workers;
    size->reason = std::move(hosts->reason);
    known = std::move(hosts->plan);
    may_grow = hosts->may_grow;
  } else {
    absl::StrAppend(&size->reason, HostLinksText(HostOfEachRank(inputs, size->world_size)));
  }
  // The figures of all hosts count, because the members are not known yet.
  absl::StatusOr<Candidate> chosen =
      known.has_value() ? *std::move(known)
                        : PlanRing(spec, direction, choice, inputs, size->world_size, control);
  if (!chosen.ok()) return chosen.status();
  chosen->plan.may_grow = may_grow;
  chosen->plan.reason =
      chosen->why.empty() ? size->reason : absl::StrCat(size->reason, "; ", chosen->why);
  return std::move(chosen->plan);
}

}  // namespace ringattn
