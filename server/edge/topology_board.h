// TopologyBoard: the newest topology and those who wait for the next.
#ifndef RINGATTN_SERVER_EDGE_TOPOLOGY_BOARD_H_
#define RINGATTN_SERVER_EDGE_TOPOLOGY_BOARD_H_

#include <cstdint>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::server {

// Thread safe. Watchers are called under the board's lock and take their own after
// it; they must not call back.
class TopologyBoard {
 public:
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void OnTopology(const v1::Topology& topology) = 0;
    // Nothing follows.
    virtual void OnClosed() = 0;
  };

  void Publish(v1::Topology topology);
  // Ends all watches and those to come.
  void Close();

  // Tells the watcher the current state at once.
  void Watch(Watcher* watcher);
  // After it the watcher is not called any more.
  void Unwatch(Watcher* watcher);

 private:
  absl::Mutex mutex_;
  v1::Topology topology_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_TOPOLOGY_BOARD_H_
