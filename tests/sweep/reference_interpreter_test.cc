// The interpreter's own rules: what it must refuse, so that a pass means something.
#include "tests/sweep/reference_interpreter.h"

#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/kernels/naive/naive_kernels.h"

namespace ringattn::tests {
namespace {

using testing::HasSubstr;

AttentionSpec Spec() {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 4;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 4};
  return spec;
}

absl::Status RunNaive(const KernelCall& call) {
  RunNaively(call);
  return absl::OkStatus();
}

TensorMap Inputs() {
  const std::vector<uint8_t> zeros(16, 0);
  return {{TensorId::kQ, zeros}, {TensorId::kK, zeros}, {TensorId::kV, zeros}};
}

// The real schedule of two ranks after `change`.
absl::Status RunChanged(const std::function<void(Schedule&)>& change,
                        const Kernels& kernels = RunNaive) {
  const AttentionSpec spec = Spec();
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
  Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward));
  change(schedule);
  return Interpret(spec, plan, schedule, Inputs(), kernels).status();
}

// The first transfer of the given kind on a rank.
Transfer& FindTransfer(Program& program, Transfer::Kind kind) {
  for (Step& step : program.steps) {
    for (Transfer& transfer : step.transfers) {
      if (transfer.kind == kind) return transfer;
    }
  }
  ADD_FAILURE() << "the schedule has no such transfer";
  static Transfer none;
  return none;
}

TEST(ReferenceInterpreter, RunsAnHonestSchedule) {
  EXPECT_TRUE(RunChanged([](Schedule&) {}).ok());
}

TEST(ReferenceInterpreter, RefusesUnmatchedTransfers) {
  const absl::Status unequal = RunChanged([](Schedule& schedule) {
    FindTransfer(schedule.programs[0], Transfer::Kind::kReceive).range.bytes -= 4;
  });
  EXPECT_EQ(unequal.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(unequal.message()), HasSubstr("which sends"));

  const absl::Status nobody_sends = RunChanged([](Schedule& schedule) {
    for (Step& step : schedule.programs[0].steps) step.transfers.clear();
  });
  EXPECT_THAT(std::string(nobody_sends.message()), HasSubstr("nothing to receive"));

  const absl::Status nobody_receives = RunChanged([](Schedule& schedule) {
    for (Step& step : schedule.programs[1].steps) {
      std::erase_if(step.transfers, [](const Transfer& transfer) {
        return transfer.kind == Transfer::Kind::kReceive;
      });
    }
  });
  EXPECT_THAT(std::string(nobody_receives.message()), HasSubstr("no matching receive"));
}

TEST(ReferenceInterpreter, RefusesReuseOfBytesInFlightBetweenHosts) {
  const auto over_hosts = [](Schedule& schedule, int steps) {
    for (Program& program : schedule.programs) {
      AssignLanes({0, 1}, program);
      // Nothing else happens in the added step.
      program.steps.emplace_back();
      for (Transfer& transfer : program.steps[0].transfers) transfer.steps = steps;
    }
  };
  EXPECT_TRUE(RunChanged([&](Schedule& schedule) { over_hosts(schedule, 1); }).ok());
  EXPECT_TRUE(RunChanged([&](Schedule& schedule) { over_hosts(schedule, 2); }).ok());
  // The call of step 1 reads the keys that may still be on their way.
  const absl::Status late = RunChanged([&](Schedule& schedule) { over_hosts(schedule, 3); });
  EXPECT_EQ(late.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(late.message()), HasSubstr("a call of step 1 uses its bytes"));
}

TEST(ReferenceInterpreter, RefusesRangesOutsideTheirBuffer) {
  const absl::Status status = RunChanged([](Schedule& schedule) {
    FindTransfer(schedule.programs[1], Transfer::Kind::kSend).range.offset += 4096;
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1, step 0"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("not inside buffer"));
}

TEST(ReferenceInterpreter, RefusesOperandsOfAnotherSize) {
  const std::function<void(ComputeCall&)> changes[] = {
      [](ComputeCall& call) { call.q.lse.bytes -= 4; },
      [](ComputeCall& call) { call.q.q = kNone; },
      [](ComputeCall& call) { call.q.out_acc = kNone; },
      [](ComputeCall& call) { --call.q.row_end; },
      [](ComputeCall& call) { call.kv.at(0).k.bytes -= 4; },
  };
  for (const auto& change : changes) {
    const absl::Status status =
        RunChanged([&](Schedule& schedule) { change(schedule.programs[0].steps[0].calls.at(0)); });
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
}

TEST(ReferenceInterpreter, RefusesOutputsOfAnotherSize) {
  const absl::Status status = RunChanged([](Schedule& schedule) {
    for (BufferSpec& buffer : schedule.programs[0].buffers) {
      if (buffer.output == TensorId::kLse) buffer.bytes += 4;
    }
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

TEST(ReferenceInterpreter, NoticesWritesOutsideABuffer) {
  const absl::Status status =
      RunChanged([](Schedule&) {},
                 [](const KernelCall& call) {
                   RunNaively(call);
                   if (const auto* forward = std::get_if<ForwardCall>(&call)) {
                     forward->lse[forward->q_rows] = 0.0f;
                   }
                   return absl::OkStatus();
                 });
  EXPECT_THAT(std::string(status.message()), HasSubstr("wrote outside lse"));
}

TEST(ReferenceInterpreter, WhatNobodyWroteIsNan) {
  const AttentionSpec spec = Spec();
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
  const Schedule schedule =
      MakeSchedule(spec, plan, RecipeOn(plan, ScheduleKind::kSingle, Direction::kForward));
  const auto outputs =
      Interpret(spec, plan, schedule, Inputs(), [](const KernelCall&) { return absl::OkStatus(); });
  ASSERT_TRUE(outputs.ok());
  const float* lse = reinterpret_cast<const float*>(outputs->at(TensorId::kLse).data());
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(lse[i] != lse[i]);
}

TEST(ReferenceInterpreter, PassesOnWhatAKernelReturns) {
  const absl::Status status =
      RunChanged([](Schedule&) {}, [](const KernelCall&) { return absl::DataLossError("broken"); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace ringattn::tests
