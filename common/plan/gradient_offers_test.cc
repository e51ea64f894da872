// Which backward calls are offered to store gradients of keys, and that all of a program's offers
// may be taken.
#include <map>
#include <random>

#include "common/plan/schedule.h"
#include "common/plan/schedule_cases.h"
#include "common/plan/schedule_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

std::map<ComputeCall::Op, int> CallsWithOffers(const Schedule& schedule) {
  std::map<ComputeCall::Op, int> calls;
  for (const Program& program : schedule.programs) {
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        if (call.offer != ComputeCall::kNoOffer) ++calls[call.op];
      }
    }
  }
  return calls;
}

// The cases of schedule_test, which takes none.
void TakeAllOffers(int seed, int count, int64_t longest) {
  std::map<ScheduleKind, int> offering;
  for (int i = 0; i < count; ++i) {
    std::mt19937 random(seed * 100000 + i);
    const ScheduleCase c = DrawScheduleCase(random, longest);
    if (c.direction != Direction::kBackward) continue;
    const Schedule schedule = c.Make();
    if (CallsWithOffers(schedule).empty()) continue;
    ++offering[c.kind];
    ScheduleSimulator simulator(c.spec, c.plan, schedule, /*takes_offers=*/true);
    ASSERT_EQ(simulator.Run(), "") << "seed " << seed << " case " << i << "\n"
                                   << Describe(c, schedule);
  }
  for (ScheduleKind kind : kAllScheduleKinds) {
    EXPECT_GT(offering[kind], 0) << ScheduleKindName(kind);
  }
}

TEST(GradientOffersTest, ManyShortSequences) { TakeAllOffers(1, 8000, 40); }

TEST(GradientOffersTest, LongerSequences) { TakeAllOffers(2, 600, 3000); }

// Not where others' queries add to a key's gradient, it travels, or it is fp32 itself.
TEST(GradientOffersTest, GradientsThatOneCallHas) {
  AttentionSpec spec = DenseSpec(64, 64);
  spec.dtype = DType::kBFloat16;
  const auto offers = [&spec](ScheduleKind kind, int ranks) {
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, ranks);
    return CallsWithOffers(
        MakeSchedule(spec, plan, kind, Direction::kBackward, /*recompute_forward=*/true));
  };
  const std::map<ComputeCall::Op, int> none;
  EXPECT_EQ(offers(ScheduleKind::kSingle, 1),
            (std::map<ComputeCall::Op, int>{{ComputeCall::Op::kBackward, 1},
                                            {ComputeCall::Op::kZero, 2},
                                            {ComputeCall::Op::kConvert, 2}}));
  EXPECT_EQ(offers(ScheduleKind::kRing, 2), none);
  EXPECT_EQ(offers(ScheduleKind::kAllGather, 2), none);
  EXPECT_EQ(offers(ScheduleKind::kPassQ, 2), none);
  spec.fp32_results = true;
  EXPECT_EQ(offers(ScheduleKind::kSingle, 1), none);
}

}  // namespace
}  // namespace ringattn
