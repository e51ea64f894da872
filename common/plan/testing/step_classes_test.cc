// Steps of one class cost the same (common/schedule/step_classes.h): plans from classes equal plans
// from the programs of all ranks.
#include "common/schedule/step_classes.h"

#include <algorithm>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/testing/time_factor.h"
#include "common/plan/cost_model.h"
#include "common/plan/host_rings.h"
#include "common/plan/testing/drawn_requests.h"
#include "common/program/access.h"
#include "common/schedule/schedule.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

struct Problem {
  AttentionSpec spec;
  ProgramRecipe recipe;
  ShardPlan shards;
  PlannerInputs inputs;
  std::vector<int> host_of_rank;
};

Plan PlanOfAllPrograms(const Problem& problem) {
  ScheduleBuilder builder(problem.spec, problem.shards, problem.recipe);
  CostSum costs(problem.spec, problem.inputs, problem.host_of_rank);
  for (int rank = 0; rank < problem.shards.world_size; ++rank) {
    Program program = builder.MakeProgram(rank);
    AssignLanes(problem.host_of_rank, program);
    costs.Add(program);
  }
  return std::move(costs).Finish(problem.recipe, problem.shards);
}

void ExpectSame(const Plan& a, const Plan& b) {
  EXPECT_EQ(a.buffer_bytes, b.buffer_bytes);
  EXPECT_EQ(a.tiles, b.tiles);
  EXPECT_EQ(a.sent_bytes, b.sent_bytes);
  EXPECT_EQ(a.exchanged_bytes, b.exchanged_bytes);
  EXPECT_EQ(a.step_count, b.step_count);
  // To the last bit: the same sums in the same order.
  EXPECT_EQ(a.predicted_compute_seconds, b.predicted_compute_seconds);
  EXPECT_EQ(a.predicted_step_seconds, b.predicted_step_seconds);
  EXPECT_EQ(a.busiest_rank_seconds, b.busiest_rank_seconds);
  EXPECT_EQ(a.flops, b.flops);
}

Problem ProblemOf(const DrawnRequest& request) {
  const PlanChoice& choice = request.forced;
  Problem problem{request.spec, {}, {}, request.inputs, {}};
  problem.recipe.schedule = *choice.schedule;
  problem.recipe.layout = *choice.layout;
  problem.recipe.stripe = choice.stripe;
  problem.recipe.direction = request.direction;
  problem.recipe.recompute_forward = choice.recompute_forward;
  problem.recipe.keeps_inputs = choice.keeps_inputs;
  problem.recipe.heads_per_step = choice.heads_per_step;
  problem.recipe.group_size = choice.group_size;
  problem.shards = MakeShardPlan(problem.spec, problem.recipe, *choice.world_size);
  problem.host_of_rank = HostOfEachRank(request.inputs, *choice.world_size);
  return problem;
}

// Returns everything in a step that may cost something, with ranks relative to the program's. The
// order of receives, which follows the numbers of the ranks, costs nothing; nor do hints, which
// follow from whole programs.
std::string TextOf(const Program& program, int step, int group_size, int world_size) {
  std::string text;
  std::vector<std::string> receives;
  std::vector<Access> before;  // accesses of the calls of the step before
  for (const ComputeCall& call :
       step > 0 ? program.steps[step - 1].calls : std::vector<ComputeCall>()) {
    const std::vector<Access> accesses = AccessesOf(call);
    before.insert(before.end(), accesses.begin(), accesses.end());
  }
  const auto add = [&](const ByteRange& range) {
    if (range.buffer == kNoBuffer) return absl::StrAppend(&text, " -");
    absl::StrAppend(&text, " ", program.buffers[range.buffer].name, "+", range.offset, ":",
                    range.bytes);
  };
  for (const Transfer& transfer : program.steps[step].transfers) {
    const int groups = world_size / group_size;
    const int outer = (transfer.peer / group_size - program.rank / group_size + groups) % groups;
    const int inner =
        (transfer.peer % group_size - program.rank % group_size + group_size) % group_size;
    const std::string others = std::exchange(text, "");
    absl::StrAppend(&text, " peer ", outer, ",", inner, " lane ", IndexOf(transfer.lane), " steps ",
                    transfer.steps);
    add(transfer.range);
    const Access own = AccessOf(transfer);
    const bool waits = std::any_of(before.begin(), before.end(),
                                   [&own](const Access& access) { return Conflict(own, access); });
    if (waits) absl::StrAppend(&text, " after calls");
    if (transfer.kind == Transfer::Kind::kReceive) {
      receives.push_back(std::exchange(text, others));
    } else {
      text = absl::StrCat(others, "send", text, "\n");
    }
  }
  std::sort(receives.begin(), receives.end());
  for (const std::string& receive : receives) absl::StrAppend(&text, "receive", receive, "\n");
  for (ComputeCall call : program.steps[step].calls) {
    for (KvOperand& keys : call.kv) keys.dk_out = keys.dv_out = kNone;
    absl::StrAppend(&text, OpName(call.op), " tiles ", call.tiles, " pairs ", call.pairs,
                    call.initial ? " initial" : "", call.final ? " final" : "", " rows ",
                    call.q.rows());
    ForEachRange(call, add);
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// Compares the steps of all ranks' programs with those of their classes' representatives, as the
// cost model gets them.
void ExpectStepsOfClasses(const Problem& problem, ScheduleBuilder& builder,
                          const ClassedPrograms& programs) {
  const StepClasses& classes = programs.classes();
  const int world_size = problem.shards.world_size;
  std::vector<std::string> of_class;  // by class, then step
  std::vector<size_t> first_of_class;
  const auto text_of = [&](const Program& program, int step) {
    return TextOf(program, step, classes.group_size, world_size);
  };
  for (const StepClasses::Representative& wanted : classes.representatives) {
    Program part = programs.MakePart(wanted.rank, wanted.entry, wanted.entry + 1);
    AssignLanes(problem.host_of_rank, part);
    first_of_class.push_back(of_class.size());
    for (int step = classes.first_step[wanted.entry]; step < classes.first_step[wanted.entry + 1];
         ++step) {
      of_class.push_back(text_of(part, step));
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    Program program = builder.MakeProgram(rank);
    AssignLanes(problem.host_of_rank, program);
    ASSERT_EQ(static_cast<int>(program.steps.size()), classes.first_step.back());
    for (int entry = 0; entry < classes.entries(); ++entry) {
      const int id = classes.class_of[rank * classes.entries() + entry];
      const int first = classes.first_step[entry];
      for (int step = first; step < classes.first_step[entry + 1]; ++step) {
        ASSERT_EQ(text_of(program, step), of_class[first_of_class[id] + step - first])
            << "rank " << rank << " entry " << entry << " class " << id;
      }
    }
  }
}

// Calls `check(problem, builder, programs)` for those of the drawn requests [first_number, end)
// whose steps have classes. Stops at the first failure.
template <typename Check>
void ForDrawnClasses(DrawnRequest (*draw)(int number), int first_number, int end, Check check) {
  for (int number = first_number; number < end; ++number) {
    const Problem problem = ProblemOf(draw(number));
    ScheduleBuilder builder(problem.spec, problem.shards, problem.recipe);
    const std::unique_ptr<const ClassedPrograms> programs =
        builder.FindStepClasses(problem.host_of_rank);
    if (programs == nullptr) continue;
    check(problem, builder, *programs);
    ASSERT_FALSE(testing::Test::HasFailure())
        << "request " << number << "\n"
        << ToString(problem.shards) << "group_size " << problem.recipe.group_size;
  }
}

bool StepsShareClasses(const ClassedPrograms& programs) {
  return programs.classes().representatives.size() < programs.classes().class_of.size();
}

TEST(StepClassesTest, StepsOfAClassAreEqual) {
  int shared = 0;
  const auto check = [&](const Problem& problem, ScheduleBuilder& builder,
                         const ClassedPrograms& programs) {
    ExpectStepsOfClasses(problem, builder, programs);
    shared += StepsShareClasses(programs);
  };
  ForDrawnClasses(DrawRing, 10000, 10600, check);
  // Requests that need a number of the keys that the others do not need: the first call of a
  // forward pass, the owner's rows, the rows of a rank's keys, and the blocks of collectors.
  for (int number : {11112, 20779, 21681, 22859}) {
    ForDrawnClasses(DrawRing, number, number + 1, check);
  }
  EXPECT_GT(shared, 400);
}

TEST(StepClassesTest, CostAsMuchAsAllPrograms) {
  int classed = 0, shared = 0, double_rings = 0;
  const auto check = [&](const Problem& problem, ScheduleBuilder&,
                         const ClassedPrograms& programs) {
    CostSum costs(problem.spec, problem.inputs, problem.host_of_rank);
    costs.AddAll(programs);
    ExpectSame(std::move(costs).Finish(problem.recipe, problem.shards), PlanOfAllPrograms(problem));
    ++classed;
    shared += StepsShareClasses(programs);
    double_rings += problem.recipe.schedule == ScheduleKind::kDoubleRing;
  };
  ForDrawnClasses(DrawRequest, 1000, 5000, check);
  EXPECT_GT(classed, 800);
  EXPECT_GT(shared, 450);
  EXPECT_GT(double_rings, 200);
}

// A causal request of 8,192 tokens per worker, on one host or on hosts of eight.
Problem LargeRing(int workers, Direction direction, bool on_hosts) {
  Problem problem;
  AttentionSpec& spec = problem.spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.num_heads = 32;
  spec.shape.num_kv_heads = 8;
  spec.shape.head_dim = spec.shape.head_dim_v = 128;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = int64_t{8192} * workers;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, spec.shape.seq_len_q};
  spec.options.causal = true;
  problem.recipe.schedule = on_hosts ? ScheduleKind::kDoubleRing : ScheduleKind::kRing;
  problem.recipe.group_size = on_hosts ? 8 : 0;
  problem.recipe.layout = Layout::kZigzag;
  problem.recipe.direction = direction;
  problem.shards = MakeShardPlan(spec, problem.recipe, workers);
  problem.inputs.ready_workers = workers;
  for (int rank = 0; on_hosts && rank < workers; ++rank) {
    problem.host_of_rank.push_back(rank / 8);
  }
  return problem;
}

size_t ClassCount(const Problem& problem) {
  ScheduleBuilder builder(problem.spec, problem.shards, problem.recipe);
  return builder.FindStepClasses(problem.host_of_rank)->classes().representatives.size();
}

TEST(StepClassesTest, LargeRingsCostAsMuchAsAllPrograms) {
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (bool on_hosts : {false, true}) {
      const Problem problem = LargeRing(40, direction, on_hosts);
      ScheduleBuilder builder(problem.spec, problem.shards, problem.recipe);
      CostSum costs(problem.spec, problem.inputs, problem.host_of_rank);
      costs.AddAll(*builder.FindStepClasses(problem.host_of_rank));
      ExpectSame(std::move(costs).Finish(problem.recipe, problem.shards),
                 PlanOfAllPrograms(problem));
    }
  }
}

// The number of different steps does not grow with the ring, so planning builds equally many.
TEST(StepClassesTest, ALargerRingHasNoMoreClasses) {
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    const size_t classes = ClassCount(LargeRing(64, direction, /*on_hosts=*/false));
    EXPECT_LT(classes, direction == Direction::kForward ? 60 : 200);
    EXPECT_EQ(ClassCount(LargeRing(128, direction, /*on_hosts=*/false)), classes);
  }
  // With hosts, only collectors differ from round to round.
  const size_t forward = ClassCount(LargeRing(64, Direction::kForward, /*on_hosts=*/true));
  EXPECT_EQ(ClassCount(LargeRing(128, Direction::kForward, /*on_hosts=*/true)), forward);
}

TEST(StepClassesTest, AThousandWorkersArePlannedInASecond) {
  const Problem problem = LargeRing(1024, Direction::kForward, /*on_hosts=*/false);
  const std::clock_t begin = std::clock();  // processor time: other processes share the machine
  const absl::StatusOr<Plan> plan =
      PlanRequest(problem.spec, Direction::kForward, {}, problem.inputs);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->shards.world_size, 1024);
  EXPECT_LT(seconds, 1.0 * kTimeFactor);
}

}  // namespace
}  // namespace ringattn
