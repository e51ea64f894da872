#include "server/edge/topology_board.h"

#include <utility>

namespace ringattn::server {

void TopologyBoard::Publish(v1::Topology topology) {
  absl::MutexLock lock(&mutex_);
  topology_ = std::move(topology);
  for (Watcher* watcher : watchers_) watcher->OnTopology(topology_);
}

void TopologyBoard::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (Watcher* watcher : std::exchange(watchers_, {})) watcher->OnClosed();
}

void TopologyBoard::Watch(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return watcher->OnClosed();
  watchers_.insert(watcher);
  watcher->OnTopology(topology_);
}

void TopologyBoard::Unwatch(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  watchers_.erase(watcher);
}

}  // namespace ringattn::server
