#include "server/edge/status/topology_board.h"

#include <utility>

#include "common/base/monotonic_time.h"

namespace ringattn::server {
namespace {

grpc::ByteBuffer Serialise(v1::Topology topology) {
  v1::WatchTopologyResponse response;
  *response.mutable_topology() = std::move(topology);
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

TopologyBoard::TopologyBoard(const TopologyBoardOptions& options)
    : options_(options), thread_([this] { Run(); }) {}

TopologyBoard::~TopologyBoard() {
  Close();
  thread_.join();
}

void TopologyBoard::Publish(v1::Topology topology, bool only_memory) {
  absl::MutexLock lock(&mutex_);
  const absl::Time due = Due();
  topology_ = std::move(topology);
  ++version_;
  unsent_ = true;
  urgent_ = urgent_ || !only_memory;
  // Reserved memory changes twice per request, which must not wake the thread each time.
  if (Due() < due) wakeup_.Notify();
}

void TopologyBoard::Close() {
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  wakeup_.Notify();
  absl::MutexLock lock(&watchers_mutex_);
  refuses_ = true;
  for (Watcher* watcher : std::exchange(watchers_, {})) watcher->OnClosed();
}

bool TopologyBoard::Watch(Watcher* watcher) {
  absl::MutexLock lock(&watchers_mutex_);
  if (refuses_) {
    watcher->OnClosed();
    return true;
  }
  if (watchers_.size() >= options_.max_watchers) return false;
  watchers_.insert(watcher);
  Refresh();
  watcher->OnTopology(response_);
  return true;
}

void TopologyBoard::Unwatch(Watcher* watcher) {
  absl::MutexLock lock(&watchers_mutex_);
  watchers_.erase(watcher);
}

absl::Time TopologyBoard::Due() const {
  if (!unsent_) return absl::InfiniteFuture();
  return sent_at_ + (urgent_ ? options_.min_interval : options_.memory_interval);
}

void TopologyBoard::Run() {
  while (true) {
    absl::Time due;
    {
      absl::MutexLock lock(&mutex_);
      due = Due();
    }
    wakeup_.WaitFor(due - MonotonicNow());
    {
      absl::MutexLock lock(&mutex_);
      if (closed_) return;
      if (MonotonicNow() < Due()) continue;
      unsent_ = urgent_ = false;
      sent_at_ = MonotonicNow();
    }
    TellAll();
  }
}

void TopologyBoard::TellAll() {
  absl::MutexLock lock(&watchers_mutex_);
  if (watchers_.empty()) return;
  Refresh();
  for (Watcher* watcher : watchers_) watcher->OnTopology(response_);
}

void TopologyBoard::Refresh() {
  v1::Topology topology;
  {
    absl::MutexLock lock(&mutex_);
    if (version_ == response_version_) return;
    response_version_ = version_;
    topology = topology_;
  }
  response_ = Serialise(std::move(topology));
}

}  // namespace ringattn::server
