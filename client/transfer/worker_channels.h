// WorkerChannels: connections to workers, shared by a client's calls, and whether direct streams
// are worth trying now.
// Tests: worker_channels_test.cc.
#ifndef RINGATTN_CLIENT_TRANSFER_WORKER_CHANNELS_H_
#define RINGATTN_CLIENT_TRANSFER_WORKER_CHANNELS_H_

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <grpcpp/channel.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {

// Thread safe.
class WorkerChannels {
 public:
  using Dial = std::function<std::shared_ptr<grpc::Channel>(const std::string& endpoint)>;
  using Channels = std::vector<std::shared_ptr<grpc::Channel>>;

  // Limits::max_streams_per_ticket.
  static constexpr int kMostPerWorker = 16;

  // Returns how many connections to each of `workers` serve a call best from a machine with
  // `cores`. One connection moves what a core can at either end. gRPC has a thread for every second
  // core, at most 16. On 16 cores, 1, 2, 4, 8 and 16 connections moved 1.9, 3.4, 5.2, 9.5 and 9.4
  // GB/s.
  static int PerWorker(int workers, int cores) {
    const int in_all = std::clamp(cores / 2, kLeastInAll, kMostInAll);
    return std::clamp((in_all + workers - 1) / workers, kLeastPerWorker, kMostPerWorker);
  }

  // Requires per_worker in 0..kMostPerWorker. 0: PerWorker decides for each call.
  WorkerChannels(Dial dial, int per_worker,
                 int cores = static_cast<int>(std::thread::hardware_concurrency()))
      : dial_(std::move(dial)), per_worker_(per_worker), cores_(cores) {}

  // Connections to one of a call's `workers`. Calls with as many workers share them.
  Channels To(const std::string& endpoint, int workers) ABSL_LOCKS_EXCLUDED(mutex_) {
    const size_t wanted = per_worker_ > 0 ? per_worker_ : PerWorker(workers, cores_);
    absl::MutexLock lock(&mutex_);
    Entry& entry = entries_[endpoint];
    while (entry.channels.size() < wanted) entry.channels.push_back(dial_(endpoint));
    entry.used = MonotonicNow();
    return {entry.channels.begin(), entry.channels.begin() + wanted};
  }

  // Closes connections that have been idle for long, because restarted workers use other ports.
  // Must not run on a thread of gRPC, which must not drop a channel's last reference.
  void Prune() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::map<std::string, Entry> gone;  // destroyed without the lock
    absl::MutexLock lock(&mutex_);
    if (entries_.size() <= kUnpruned) return;
    const absl::Time old = MonotonicNow() - kKept;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto next = std::next(entry);
      if (entry->second.used < old) gone.insert(entries_.extract(entry));
      entry = next;
    }
  }

  // Records that a worker is unreachable, so that calls do not try again for a while.
  void NoteUnreachable(const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    unreachable_ = why;
    unreachable_until_ = MonotonicNow() + kTriedAgainAfter;
  }
  // Why a call should not try direct streams; empty if it may.
  std::string UnreachableReason() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return MonotonicNow() < unreachable_until_ ? unreachable_ : "";
  }

 private:
  static constexpr int kLeastInAll = 8, kMostInAll = 16, kLeastPerWorker = 2;
  static constexpr size_t kUnpruned = 64;
  static constexpr absl::Duration kKept = absl::Minutes(10);
  static constexpr absl::Duration kTriedAgainAfter = absl::Seconds(30);

  struct Entry {
    Channels channels;
    absl::Time used;
  };

  const Dial dial_;
  const int per_worker_;
  const int cores_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::string unreachable_ ABSL_GUARDED_BY(mutex_);
  absl::Time unreachable_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_WORKER_CHANNELS_H_
