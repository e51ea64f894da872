#include "server/edge/status/topology_board.h"

#include <cstdlib>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

// Records the calls it receives.
class Listening final : public TopologyBoard::Watcher {
 public:
  void OnTopology(const grpc::ByteBuffer& response) override {
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(response.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 1);
    v1::WatchTopologyResponse message;
    EXPECT_TRUE(message.ParseFromArray(slices[0].begin(), slices[0].size()));
    absl::MutexLock lock(&mutex_);
    generations_.push_back(message.topology().generation());
    bytes_.push_back(slices[0].begin());
  }
  void OnClosed() override {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  bool Await(uint64_t generation) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&] {
      mutex_.AssertHeld();
      return !generations_.empty() && generations_.back() == generation;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(10));
  }
  size_t count() {
    absl::MutexLock lock(&mutex_);
    return generations_.size();
  }
  const unsigned char* last_bytes() {
    absl::MutexLock lock(&mutex_);
    return bytes_.back();
  }
  bool closed() {
    absl::MutexLock lock(&mutex_);
    return closed_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<uint64_t> generations_ ABSL_GUARDED_BY(mutex_);
  std::vector<const unsigned char*> bytes_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

v1::Topology Generation(uint64_t generation) {
  v1::Topology topology;
  topology.set_generation(generation);
  // Larger than a slice's inline storage.
  topology.add_workers()->set_name(std::string(100, 'w'));
  return topology;
}

TEST(TopologyBoardTest, SendsTheNewestImmediately) {
  TopologyBoard board;
  board.Publish(Generation(3), false);
  Listening watcher;
  ASSERT_TRUE(board.Watch(&watcher));
  EXPECT_TRUE(watcher.Await(3));
  board.Publish(Generation(4), false);
  EXPECT_TRUE(watcher.Await(4));
  board.Unwatch(&watcher);
  board.Close();
  EXPECT_FALSE(watcher.closed());
}

TEST(TopologyBoardTest, FrequentChangesAreCombined) {
  TopologyBoard board({.min_interval = absl::Milliseconds(1), .memory_interval = absl::Hours(1)});
  Listening watcher;
  ASSERT_TRUE(board.Watch(&watcher));
  board.Publish(Generation(1), true);  // the first is due immediately
  ASSERT_TRUE(watcher.Await(1));
  const size_t before = watcher.count();
  for (int i = 2; i < 1000; ++i) board.Publish(Generation(i), true);
  // A change of members is sent without delay, together with the pending changes.
  board.Publish(Generation(1000), false);
  EXPECT_TRUE(watcher.Await(1000));
  EXPECT_EQ(watcher.count(), before + 1);
  board.Unwatch(&watcher);
}

TEST(TopologyBoardTest, OneSerializationServesAll) {
  TopologyBoard board;
  Listening first, second;
  ASSERT_TRUE(board.Watch(&first));
  ASSERT_TRUE(board.Watch(&second));
  board.Publish(Generation(9), false);
  ASSERT_TRUE(first.Await(9));
  ASSERT_TRUE(second.Await(9));
  EXPECT_EQ(first.last_bytes(), second.last_bytes());
  board.Unwatch(&first);
  board.Unwatch(&second);
}

TEST(TopologyBoardTest, WatchersAreBounded) {
  TopologyBoard board({.max_watchers = 2});
  Listening first, second, third;
  EXPECT_TRUE(board.Watch(&first));
  EXPECT_TRUE(board.Watch(&second));
  EXPECT_FALSE(board.Watch(&third));
  EXPECT_EQ(third.count(), 0);
  board.Unwatch(&first);
  EXPECT_TRUE(board.Watch(&third));
  board.Close();
  EXPECT_TRUE(second.closed());
  EXPECT_TRUE(third.closed());
  Listening late;
  EXPECT_TRUE(board.Watch(&late));
  EXPECT_TRUE(late.closed());
}

}  // namespace
}  // namespace ringattn::server
