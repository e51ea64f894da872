// TopologyBoard: the newest topology and those who wait for the next.
#ifndef RINGATTN_SERVER_EDGE_STATUS_TOPOLOGY_BOARD_H_
#define RINGATTN_SERVER_EDGE_STATUS_TOPOLOGY_BOARD_H_

#include <cstdint>
#include <set>
#include <thread>

#include <grpcpp/support/byte_buffer.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::server {

struct TopologyBoardOptions {
  // Each holds a stream and is told every change: some 10 us each, so 1,024 of them cost
  // 2% of a core while requests come and go, at memory_interval.
  size_t max_watchers = 1024;
  // Changes that come faster are told together. Members first; what is reserved and in
  // flight changes with every request.
  absl::Duration min_interval = absl::Milliseconds(20);
  absl::Duration memory_interval = absl::Milliseconds(500);
};

// Watchers are told on a thread of the board's own, so whoever publishes never waits for
// them; each topology is serialised once for all. Thread safe. Watchers are called under a
// lock of the board and take their own after it; they must not call back.
class TopologyBoard {
 public:
  class Watcher {
   public:
    virtual ~Watcher() = default;
    // `response` is a serialised WatchTopologyResponse; copies share its bytes.
    virtual void OnTopology(const grpc::ByteBuffer& response) = 0;
    // Nothing follows.
    virtual void OnClosed() = 0;
  };

  explicit TopologyBoard(const TopologyBoardOptions& options = {});
  ~TopologyBoard();  // closes

  // `only_memory`: nothing changed but what is reserved and in flight.
  void Publish(v1::Topology topology, bool only_memory);
  // Ends all watches and those to come.
  void Close();

  // Tells the watcher the current state at once. False, and nothing done, if there are too
  // many; OnClosed if the board is closed.
  bool Watch(Watcher* watcher);
  // After it the watcher is not called any more.
  void Unwatch(Watcher* watcher);

 private:
  void Run();
  // When the next round is due.
  absl::Time Due() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellAll() ABSL_LOCKS_EXCLUDED(mutex_, watchers_mutex_);
  // Serialises the newest topology, unless that has been done.
  void Refresh() ABSL_EXCLUSIVE_LOCKS_REQUIRED(watchers_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);

  const TopologyBoardOptions options_;

  absl::Mutex watchers_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::set<Watcher*> watchers_ ABSL_GUARDED_BY(watchers_mutex_);
  bool refuses_ ABSL_GUARDED_BY(watchers_mutex_) = false;  // closed, as watchers see it
  grpc::ByteBuffer response_ ABSL_GUARDED_BY(watchers_mutex_);
  int64_t response_version_ ABSL_GUARDED_BY(watchers_mutex_) = -1;

  absl::Mutex mutex_;  // held for moments only
  v1::Topology topology_ ABSL_GUARDED_BY(mutex_);
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool untold_ ABSL_GUARDED_BY(mutex_) = false;
  bool urgent_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time told_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();

  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_TOPOLOGY_BOARD_H_
