// TopologyBoard: the newest topology, and the watchers of changes.
#ifndef RINGATTN_SERVER_EDGE_STATUS_TOPOLOGY_BOARD_H_
#define RINGATTN_SERVER_EDGE_STATUS_TOPOLOGY_BOARD_H_

#include <cstdint>
#include <set>
#include <thread>

#include <grpcpp/support/byte_buffer.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::server {

struct TopologyBoardOptions {
  // Each watcher holds a stream and receives every change at about 10 us each. At memory_interval,
  // 1,024 watchers cost 2% of a core under load.
  size_t max_watchers = 1024;
  // Changes within this interval are combined: first for members; second for reserved memory, which
  // changes with every request.
  absl::Duration min_interval = absl::Milliseconds(20);
  absl::Duration memory_interval = absl::Milliseconds(500);
};

// A dedicated thread calls the watchers, so publishers never wait for them; each topology is
// serialized once for all. Thread safe. Watchers are called under a lock of the board and take
// their own lock after it; they must not call back.
class TopologyBoard {
 public:
  class Watcher {
   public:
    virtual ~Watcher() = default;
    // `response` is a serialized WatchTopologyResponse; copies share its bytes.
    virtual void OnTopology(const grpc::ByteBuffer& response) = 0;
    // No call follows.
    virtual void OnClosed() = 0;
  };

  explicit TopologyBoard(const TopologyBoardOptions& options = {});
  ~TopologyBoard();  // closes

  // `only_memory`: only the reserved memory has changed.
  void Publish(v1::Topology topology, bool only_memory);
  // Ends all current and future watches.
  void Close();

  // Sends the current state to the watcher immediately. Returns false, without effect, if there are
  // too many watchers. Calls OnClosed if the board is closed.
  bool Watch(Watcher* watcher);
  // The watcher is not called afterwards.
  void Unwatch(Watcher* watcher);

 private:
  void Run();
  // Returns when the next round is due.
  absl::Time Due() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellAll() ABSL_LOCKS_EXCLUDED(mutex_, watchers_mutex_);
  // Serializes the newest topology unless it has been serialized already.
  void Refresh() ABSL_EXCLUSIVE_LOCKS_REQUIRED(watchers_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);

  const TopologyBoardOptions options_;

  absl::Mutex watchers_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::set<Watcher*> watchers_ ABSL_GUARDED_BY(watchers_mutex_);
  bool refuses_ ABSL_GUARDED_BY(watchers_mutex_) = false;  // closed, as seen by watchers
  grpc::ByteBuffer response_ ABSL_GUARDED_BY(watchers_mutex_);
  int64_t response_version_ ABSL_GUARDED_BY(watchers_mutex_) = -1;

  Wakeup wakeup_;      // when Due() becomes earlier, and after Close()
  absl::Mutex mutex_;  // held only briefly
  v1::Topology topology_ ABSL_GUARDED_BY(mutex_);
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool unsent_ ABSL_GUARDED_BY(mutex_) = false;
  bool urgent_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time sent_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();

  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_TOPOLOGY_BOARD_H_
