// Threads, stops, and values that are not finite.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cpu/testing/kernel_runner.h"
#include "worker/kernels/cpu/workspace/pause.h"
#include "worker/kernels/work.h"

namespace ringattn::worker {
namespace {

class RobustnessTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, RobustnessTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

bool SameBits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_P(RobustnessTest, SameBitsForAnyNumberOfThreads) {
  TestShape shape = PiecesShape();
  shape.dtype = GetParam();
  shape.kv_heads = 1;  // all threads meet in the same rows of dq
  TestData data(shape);
  const Reference reference(data);
  CpuKernels one(1);
  const ForwardResult forward = RunForward(one, data, {2});
  const BackwardResult backward = RunBackward(one, data, reference);
  for (int threads : {2, 3, 7}) {
    CpuKernels many(threads);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const ForwardResult other = RunForward(many, data, {2});
      EXPECT_TRUE(SameBits(forward.out, other.out));
      EXPECT_TRUE(SameBits(forward.lse, other.lse));
      const BackwardResult gradients = RunBackward(many, data, reference);
      EXPECT_TRUE(SameBits(backward.dq, gradients.dq));
      for (size_t i = 0; i < gradients.dk.size(); ++i) {
        EXPECT_TRUE(SameBits(backward.dk[i], gradients.dk[i]));
        EXPECT_TRUE(SameBits(backward.dv[i], gradients.dv[i]));
      }
    }
  }
}

// Pauses at any moment change no bit.
TEST_P(RobustnessTest, SameBitsWithPauses) {
  TestShape shape = DenseShape(2000, 2000, true);
  shape.dtype = GetParam();
  TestData data(shape);
  const Reference reference(data);
  CpuKernels undisturbed(2);
  const ForwardResult forward = RunForward(undisturbed, data, {1});
  const BackwardResult backward = RunBackward(undisturbed, data, reference);
  cpu::Pause pause;
  CpuKernels kernels(2, &pause);
  std::atomic<bool> over{false};
  std::thread pauses([&] {
    while (!over) {
      pause.Begin(std::chrono::seconds(10));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      pause.End();
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  });
  const ForwardResult other = RunForward(kernels, data, {1});
  const BackwardResult gradients = RunBackward(kernels, data, reference);
  over = true;
  pauses.join();
  EXPECT_TRUE(SameBits(forward.out, other.out));
  EXPECT_TRUE(SameBits(forward.lse, other.lse));
  EXPECT_TRUE(SameBits(backward.dq, gradients.dq));
  EXPECT_TRUE(SameBits(backward.dk[0], gradients.dk[0]));
  EXPECT_TRUE(SameBits(backward.dv[0], gradients.dv[0]));
}

// NaN and infinity in a key, a value, a query and a dout row reach exactly the
// rows and keys that see them: causal, so key 20 and row 20 split the rest.
TEST_P(RobustnessTest, PoisonStaysWhereItIsSeen) {
  constexpr int64_t kRows = 150;
  constexpr int64_t kPoisoned = 20;
  for (float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (int which = 0; which < 4; ++which) {
      SCOPED_TRACE(testing::Message() << "tensor " << which << " poison " << poison);
      TestShape shape = DenseShape(kRows, kRows, true);
      shape.dtype = GetParam();
      shape.heads = shape.kv_heads = 2;
      TestData data(shape);
      TestTensor* tensors[] = {&data.q, &data.k[0], &data.v[0], &data.dout};
      for (int64_t h = 0; h < shape.heads; ++h) {
        tensors[which]->Set((kPoisoned * shape.heads + h) * 16 + 5, poison);
      }
      const Reference reference(data);
      CpuKernels kernels(2);
      const ForwardResult forward = RunForward(kernels, data, {1});
      const BackwardResult backward = RunBackward(kernels, data, reference);
      for (int64_t i = 0; i < kRows; ++i) {
        // out of row i; dq of row i; dk and dv of key i.
        const bool key_side = which == 1 || which == 2;
        const bool row_may_fail = key_side ? i >= kPoisoned : i == kPoisoned;
        const bool key_may_fail = key_side || i <= kPoisoned;
        for (int64_t e = i * 32; e < (i + 1) * 32; ++e) {
          if (!row_may_fail) {
            ASSERT_TRUE(std::isfinite(forward.out[e])) << "out of row " << i;
            ASSERT_TRUE(std::isfinite(backward.dq[e])) << "dq of row " << i;
          }
          if (!key_may_fail) {
            ASSERT_TRUE(std::isfinite(backward.dk[0][e])) << "dk of key " << i;
            ASSERT_TRUE(std::isfinite(backward.dv[0][e])) << "dv of key " << i;
          }
        }
      }
      if (std::isnan(poison)) {
        ExpectForward(shape, forward, reference);
        ExpectBackward(shape, backward, reference);
      }
    }
  }
}

// Rows and keys that no piece names are never read.
TEST_P(RobustnessTest, PaddingIsNotRead) {
  TestShape shape = DenseShape(40, 40, true);
  shape.dtype = GetParam();
  shape.q_rows = shape.kv_rows[0] = 60;
  TestData data(shape);
  for (TestTensor* tensor : {&data.q, &data.k[0], &data.v[0], &data.dout}) {
    for (int64_t i = 40 * 16; i < 60 * 16; ++i) tensor->Set(i, NAN);
  }
  const Reference reference(data);
  CpuKernels kernels(2);
  ExpectForward(shape, RunForward(kernels, data, {1}), reference);
  ExpectBackward(shape, RunBackward(kernels, data, reference), reference);
}

// The unit of progress: each visible pair counts once per call.
TEST(WorkTest, CountsVisiblePairs) {
  TestShape shape = PiecesShape();
  shape.batch = 2;
  shape.head_dim = 8;
  TestData data(shape);
  int64_t pairs = 0;
  for (const Piece& q : shape.q_pieces) {
    for (const auto& pieces : shape.kv_pieces) {
      for (const Piece& k : pieces) {
        if (q.document != k.document) continue;
        const Band& band = shape.bands[q.document];
        for (int64_t i = 0; i < q.length; ++i) {
          for (int64_t j = 0; j < k.length; ++j) {
            const int64_t distance = k.PositionOf(j) - q.PositionOf(i);
            pairs += distance >= band.lower && distance <= band.upper;
          }
        }
      }
    }
  }
  pairs *= shape.batch * shape.heads;
  Floats lse(shape.batch * shape.heads * shape.q_rows), delta(lse.size()), dq(data.q.count);
  std::vector<Floats> dk, dv;
  for (size_t i = 0; i < data.k.size(); ++i) {
    dk.emplace_back(data.k[i].count);
    dv.emplace_back(data.v[i].count);
  }
  Floats out(data.dout.count);
  ForwardCall forward;
  forward.problem = &data.problem;
  forward.q_rows = shape.q_rows;
  forward.q_pieces = shape.q_pieces;
  forward.q = data.q.data();
  forward.blocks = data.Blocks(&dk, &dv);
  forward.lse = lse.data();
  forward.out = out.data();
  forward.initial = forward.final = true;
  BackwardCall backward;
  backward.problem = &data.problem;
  backward.q_rows = shape.q_rows;
  backward.q_pieces = shape.q_pieces;
  backward.q = data.q.data();
  backward.dout = data.dout.data();
  backward.lse = lse.data();
  backward.delta = delta.data();
  backward.dq_acc = dq.data();
  backward.blocks = forward.blocks;
  CpuKernels kernels(2);
  const std::atomic<bool> stop{false};
  std::atomic<int64_t> work{0};
  ASSERT_TRUE(kernels.Run(forward, stop, nullptr, &work).ok());
  EXPECT_EQ(work, pairs * ForwardPairWork(8, 16));
  work = 0;
  ASSERT_TRUE(kernels.Run(backward, stop, nullptr, &work).ok());
  EXPECT_EQ(work, pairs * BackwardPairWork(8, 16));
}

TEST(StopTest, StopsAtTheNextTile) {
  TestShape shape = DenseShape(3000, 3000, true);
  shape.heads = 4;
  shape.kv_heads = 1;
  TestData data(shape);
  CpuKernels kernels(3);
  Floats lse(4 * 3000), delta(4 * 3000), dq(data.q.count);
  std::vector<Floats> dk = {Floats(data.k[0].count)};
  std::vector<Floats> dv = {Floats(data.v[0].count)};
  Floats out(data.dout.count);
  ForwardCall forward;
  forward.problem = &data.problem;
  forward.q_rows = 3000;
  forward.q_pieces = shape.q_pieces;
  forward.q = data.q.data();
  forward.blocks = data.Blocks(&dk, &dv);
  forward.lse = lse.data();
  forward.out = out.data();
  forward.initial = forward.final = true;
  BackwardCall backward;
  backward.problem = &data.problem;
  backward.q_rows = 3000;
  backward.q_pieces = shape.q_pieces;
  backward.q = data.q.data();
  backward.dout = data.dout.data();
  backward.lse = lse.data();
  backward.delta = delta.data();
  backward.dq_acc = dq.data();
  backward.blocks = forward.blocks;
  for (const KernelCall& call : {KernelCall(forward), KernelCall(backward)}) {
    std::atomic<int64_t> all_tiles{0};
    std::atomic<bool> stop{false};
    ASSERT_TRUE(kernels.Run(call, stop, &all_tiles).ok());
    EXPECT_GT(all_tiles, 100);
    std::atomic<int64_t> tiles{0};
    std::thread stopper([&] {
      while (tiles.load() < 10) std::this_thread::yield();
      stop.store(true);
    });
    EXPECT_EQ(kernels.Run(call, stop, &tiles).code(), absl::StatusCode::kCancelled);
    stopper.join();
    EXPECT_LT(tiles, all_tiles);
    // The next call is as if nothing had happened.
    stop.store(false);
    tiles.store(0);
    EXPECT_TRUE(kernels.Run(call, stop, &tiles).ok());
    EXPECT_EQ(tiles, all_tiles);
  }
}

}  // namespace
}  // namespace ringattn::worker
