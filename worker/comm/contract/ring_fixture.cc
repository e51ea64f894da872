#include "worker/comm/contract/ring_fixture.h"

#include <thread>

#include "absl/time/clock.h"

namespace ringattn::worker {

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

std::vector<uint8_t> Pattern(int64_t bytes, int seed) {
  std::vector<uint8_t> data(bytes);
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 31 + seed + (i >> 13));
  return data;
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

bool Formed(const Ring& ring) {
  return std::all_of(ring.begin(), ring.end(),
                     [](const auto& member) { return member != nullptr; });
}

Memory::Memory(TestRank* rank, const std::vector<uint8_t>& bytes)
    : rank_(rank), bytes_(bytes.size()), data_(rank->Allocate(bytes.size())) {
  EXPECT_NE(data_, nullptr);
  rank_->Write(data_, bytes.data(), bytes_);
}

std::vector<uint8_t> Memory::Read() const {
  std::vector<uint8_t> bytes(bytes_);
  rank_->Read(bytes.data(), data_, bytes_);
  return bytes;
}

Ranks::Ranks(const RingUnderTest& ring, TestRankOptions options) {
  options.on_stuck = [](const std::string& what) { ADD_FAILURE() << what; };
  ranks_ = ring.make_ranks(options);
  EXPECT_EQ(size(), options.world_size);
}

std::vector<std::string> Ranks::Prepare(uint64_t generation) {
  std::vector<std::string> blobs;
  for (int rank = 0; rank < size(); ++rank) {
    auto blob = transport(rank).Prepare(generation, rank, size());
    EXPECT_TRUE(blob.ok()) << blob.status();
    blobs.push_back(blob.ok() ? *blob : "");
  }
  return blobs;
}

Ring Ranks::Form(uint64_t generation) {
  const std::vector<std::string> blobs = Prepare(generation);
  Ring ring(size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] {
      auto communicator = transport(rank).Connect(generation, blobs, Soon());
      EXPECT_TRUE(communicator.ok()) << communicator.status();
      if (communicator.ok()) ring[rank] = *std::move(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ring;
}

std::vector<int> RingTest::WorldSizes(const std::vector<int>& wanted) const {
  std::vector<int> sizes;
  for (int size : wanted) {
    if (size <= GetParam().max_world_size) sizes.push_back(size);
  }
  return sizes;
}

std::vector<RingUnderTest> RingsOfMany() {
  std::vector<RingUnderTest> rings;
  for (RingUnderTest& ring : RingsUnderTest()) {
    if (!ring.single_rank_only) rings.push_back(std::move(ring));
  }
  return rings;
}

}  // namespace ringattn::worker
