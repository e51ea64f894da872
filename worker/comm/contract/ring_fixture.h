// Building blocks of the contract's cases: rings and their ranks' memory.
#ifndef RINGATTN_WORKER_COMM_CONTRACT_RING_FIXTURE_H_
#define RINGATTN_WORKER_COMM_CONTRACT_RING_FIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/comm/communicator.h"
#include "worker/comm/contract/ring_under_test.h"

namespace ringattn::worker {

using Ring = std::vector<std::unique_ptr<Communicator>>;

// An abort takes at most a second; a loaded machine may take longer.
inline constexpr absl::Duration kAbortBound = absl::Seconds(5);

// A deadline so late that only work which never ends misses it.
absl::Time Soon();

// Returns bytes that depend on their position and their sender (`seed`).
std::vector<uint8_t> Pattern(int64_t bytes, int seed);

std::string Message(const absl::Status& status);

// Returns true if every rank has a communicator.
bool Formed(const Ring& ring);

// Memory of one rank. Not thread safe.
class Memory {
 public:
  Memory(TestRank* rank, int64_t bytes) : Memory(rank, std::vector<uint8_t>(bytes, 0xee)) {}
  Memory(TestRank* rank, const std::vector<uint8_t>& bytes);
  ~Memory() { rank_->Free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }
  std::vector<uint8_t> Read() const;

 private:
  TestRank* const rank_;
  const int64_t bytes_;
  void* const data_;
};

using MemoryRef = std::unique_ptr<Memory>;

// The ranks of one ring. A transport that reports itself as stuck fails the test.
class Ranks {
 public:
  Ranks(const RingUnderTest& ring, TestRankOptions options);

  int size() const { return static_cast<int>(ranks_.size()); }
  TestRank* operator[](int rank) { return ranks_[rank].get(); }
  RingTransport& transport(int rank) { return ranks_[rank]->transport(); }

  // Runs phase one on every rank; Form runs both phases.
  std::vector<std::string> Prepare(uint64_t generation);
  Ring Form(uint64_t generation);

 private:
  std::vector<std::unique_ptr<TestRank>> ranks_;
};

// Parameterized by RingsUnderTest().
class RingTest : public ::testing::TestWithParam<RingUnderTest> {
 protected:
  Ranks MakeRanks(int world_size, absl::Duration step_timeout = absl::Minutes(1),
                  int max_ctas = 4) const {
    return Ranks(GetParam(), {.world_size = world_size,
                              .step_timeout = step_timeout,
                              .max_ctas = max_ctas,
                              .on_stuck = nullptr});
  }
  // Returns those of `wanted` for which there are devices.
  std::vector<int> WorldSizes(const std::vector<int>& wanted) const;
  int LargestWorld(int wanted) const { return std::min(wanted, GetParam().max_world_size); }
};

// Rings of at least two ranks; skipped if the machine has too few devices.
class RingOfManyTest : public RingTest {
 protected:
  void SetUp() override {
    if (GetParam().max_world_size < 2) GTEST_SKIP() << "needs two devices";
  }
};

inline std::string RingName(const ::testing::TestParamInfo<RingUnderTest>& info) {
  return info.param.name;
}

// Returns RingsUnderTest() without those that only form rings of one.
std::vector<RingUnderTest> RingsOfMany();

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CONTRACT_RING_FIXTURE_H_
