// Residuals of forward operations and backward operations that read them: memory, budget and
// bit-equal results.
#include "worker/operation/residual.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/executor.h"

namespace ringattn::worker {
namespace {

AttentionSpec SpecOf(bool sinks) {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 19;
  spec.shape.num_heads = 4;
  spec.shape.num_kv_heads = 2;
  spec.shape.head_dim = 8;
  spec.shape.head_dim_v = 12;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 19};
  spec.options.softmax_scale = 0.35;
  spec.options.causal = true;
  spec.options.sinks = sinks;
  return spec;
}

class ResidualTest : public testing::Test {
 protected:
  std::unique_ptr<Operation> Make(const AttentionSpec& spec, Direction direction,
                                  std::vector<LentBuffer> lent = {}) {
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
    ProgramRecipe recipe = RecipeOn(plan, ScheduleKind::kSingle, direction);
    recipe.keeps_inputs = direction == Direction::kForward;
    Program program = MakeProgram(spec, plan, recipe, 0);
    auto operation =
        Operation::Create(spec, plan, std::move(program), {0}, &device_, std::move(lent));
    EXPECT_TRUE(operation.ok()) << operation.status();
    return *std::move(operation);
  }
  // Fills a tensor with values that depend only on its id.
  static void Fill(Operation& operation, TensorId id) {
    auto* values = static_cast<float*>(operation.InputBuffer(id)->data());
    uint32_t seed = static_cast<uint32_t>(id);
    for (int64_t i = 0; i < operation.ShardBytes(id) / 4; ++i) {
      seed = seed * 1664525u + 1013904223u;
      values[i] = static_cast<float>(seed >> 8) / (1 << 24) * 2.0f - 1.0f;
    }
  }
  void FillUploads(Operation& operation) {
    for (const BufferSpec& buffer : operation.program().buffers) {
      if (buffer.source == BufferSource::kUpload) Fill(operation, *buffer.input);
    }
  }
  void Run(Operation& operation) {
    auto ring = MakeInProcessRing(1);
    const auto report = Execute(operation, device_, ring[0].get(), {}, nullptr);
    ASSERT_TRUE(report.ok()) << report.status();
  }

  CpuDevice device_{1, 1 << 20};
  MemoryBudget budget_{1 << 20};
  ResidualStore store_;
};

TEST_F(ResidualTest, BackwardReadsResidualAndMemoryIsCountedOnce) {
  for (const bool sinks : {false, true}) {
    const AttentionSpec spec = SpecOf(sinks);
    std::unique_ptr<Operation> forward = Make(spec, Direction::kForward);
    auto reservation = budget_.Take(forward->buffer_bytes());
    ASSERT_TRUE(reservation.ok());
    FillUploads(*forward);
    Run(*forward);
    const int64_t bytes = ResidualBytes(*forward);
    int64_t expected = 0;
    for (TensorId id : ResidualTensors(spec)) expected += BytesOf(spec, id);
    EXPECT_EQ(bytes, expected);

    // The same tensors, uploaded instead of lent.
    std::unique_ptr<Operation> stateless = Make(spec, Direction::kBackward);
    FillUploads(*stateless);
    for (TensorId id : {TensorId::kOut, TensorId::kLse}) {
      std::memcpy(stateless->InputBuffer(id)->data(), forward->OutputBuffer(id)->data(),
                  forward->ShardBytes(id));
    }
    Run(*stateless);

    store_.Put("1-1", MakeResidual(*forward, *reservation));
    forward.reset();
    { MemoryBudget::Reservation rest = *std::move(reservation); }
    EXPECT_EQ(budget_.taken_bytes(), bytes);
    EXPECT_EQ(store_.bytes(), bytes);
    EXPECT_EQ(store_.count(), 1);

    const AttentionShape& shape = spec.shape;
    const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
    const Program program =
        MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kSingle, Direction::kBackward), 0);
    auto lent = Residual::LendTo(program, store_.Find("1-1"));
    ASSERT_TRUE(lent.ok()) << lent.status();
    std::unique_ptr<Operation> backward = Make(spec, Direction::kBackward, *std::move(lent));
    EXPECT_EQ(backward->buffer_bytes(), stateless->buffer_bytes() - bytes);
    for (const BufferSpec& buffer : backward->program().buffers) {
      if (buffer.source == BufferSource::kUpload) {
        EXPECT_EQ(buffer.input, TensorId::kDout);
      }
    }
    FillUploads(*backward);
    Run(*backward);
    for (TensorId id : OutputsOf(spec, Direction::kBackward)) {
      EXPECT_EQ(std::memcmp(backward->OutputBuffer(id)->data(), stateless->OutputBuffer(id)->data(),
                            backward->ShardBytes(id)),
                0)
          << TensorName(id) << " of " << shape.seq_len_q;
    }
    // A reader keeps the residual, and the budget counts its bytes until the reader is destroyed.
    store_.Drop("1-1");
    EXPECT_EQ(store_.bytes(), 0);
    EXPECT_EQ(budget_.taken_bytes(), bytes);
    backward.reset();
    EXPECT_EQ(budget_.taken_bytes(), 0);
  }
}

TEST_F(ResidualTest, MissingTensorIsNamed) {
  std::unique_ptr<Operation> forward = Make(SpecOf(/*sinks=*/false), Direction::kForward);
  auto reservation = budget_.Take(forward->buffer_bytes());
  ASSERT_TRUE(reservation.ok());
  const auto residual = MakeResidual(*forward, *reservation);
  const AttentionSpec other = SpecOf(/*sinks=*/true);
  const ShardPlan plan = MakeShardPlan(other, Layout::kContiguous, 1);
  const Program program =
      MakeProgram(other, plan, RecipeOn(plan, ScheduleKind::kSingle, Direction::kBackward), 0);
  EXPECT_EQ(Residual::LendTo(program, residual).status(),
            absl::InvalidArgumentError("the residual has no sinks for this operation"));
}

TEST_F(ResidualTest, ClearDropsAllResiduals) {
  for (const char* id : {"1-1", "1-2"}) {
    std::unique_ptr<Operation> forward = Make(SpecOf(false), Direction::kForward);
    auto reservation = budget_.Take(forward->buffer_bytes());
    ASSERT_TRUE(reservation.ok());
    store_.Put(id, MakeResidual(*forward, *reservation));
  }
  EXPECT_EQ(store_.count(), 2);
  EXPECT_EQ(store_.Find("1-3"), nullptr);
  store_.Drop("1-3");
  store_.Clear();
  EXPECT_EQ(store_.count(), 0);
  EXPECT_EQ(budget_.taken_bytes(), 0);
}

}  // namespace
}  // namespace ringattn::worker
