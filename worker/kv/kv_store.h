// KvStore: the K/V caches of a worker. Executes the coordinator's messages about caches, admits the
// streams of their writers, and frees caches whose coordinator does not return.
//
// A cache belongs to no generation of a ring: tearing a ring down, or forming one, does not touch
// it. When the coordinator is lost, writers go on. The next coordinator learns of the caches from
// Register.kv_caches. A cache that no coordinator has spoken of for `orphan_time` is freed.
#ifndef RINGATTN_WORKER_KV_KV_STORE_H_
#define RINGATTN_WORKER_KV_KV_STORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/device/device.h"
#include "worker/device/host_queue.h"
#include "worker/kv/kv_engine.h"
#include "worker/kv/kv_shard.h"
#include "worker/operation/memory_budget.h"

namespace ringattn::worker {

// A writer's stream to one cache. Thread safe.
class KvStream {
 public:
  virtual ~KvStream() = default;
  // Ends the call with `status`, soon. Never blocks and makes no callback.
  virtual void End(const absl::Status& status) = 0;
};

// One rank of a cache on this worker.
class KvCache {
 public:
  const std::string& id() const { return reserve_.cache_id(); }

  // On the engine's thread: null once the cache was freed.
  KvShard* shard() const { return shard_.get(); }
  // Set while the calls of the cache must end early.
  const std::atomic<bool>& stop() const { return stop_; }
  // On the engine's thread, after work on the shard: publishes its progress. `used` renews the
  // lease.
  void Publish(absl::Time now, bool used) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class KvStore;
  // The shard's progress in control messages.
  struct Progress {
    uint64_t epoch = 0;
    uint64_t committed = 0;
    uint64_t complete = 0;
    int64_t blocks_used = 0;
    int64_t sequences = 0;
    absl::Time last_use;
    bool unreported = false;
    std::string failure;  // the device has lost the cache
    bool failure_reported = false;
  };

  Progress progress() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return progress_;
  }

  v1::KvReserve reserve_;
  absl::Duration ttl_;
  int64_t bytes_ = 0;
  std::unique_ptr<KvShard> shard_;  // engine's thread, after zeroed_
  // Likewise: of the entries, and of what the device takes in addition.
  MemoryBudget::Reservation reservation_, tables_;
  std::atomic<bool> stop_{false};
  absl::Notification zeroed_;

  absl::Mutex mutex_;
  Progress progress_ ABSL_GUARDED_BY(mutex_);

  // Guarded by the store's mutex.
  uint64_t opened_epoch_ = 0;
  bool settled_ = false;   // opened_epoch_ is; streams are admitted
  std::string token_;      // of opened_epoch_
  std::string region_id_;  // of opened_epoch_: where its rings may be; empty: nowhere
  std::weak_ptr<KvStream> stream_;
  absl::Time next_report_;
};

struct KvStoreOptions {
  int64_t max_bytes = 0;  // of all caches together
  absl::Duration orphan_time = absl::Seconds(60);
  absl::Duration report_interval = absl::Seconds(1);  // of KvTouched, per cache
  // How often Tick is called; 0: by the owner.
  absl::Duration tick_interval = absl::Milliseconds(250);
  std::function<absl::Time()> now;  // null: MonotonicNow
};

// Thread safe. The control messages are to be passed in the order of their arrival.
class KvStore {
 public:
  // `send` passes a message to the coordinator and must not block. `device` and `budget` must
  // outlive the store. A device without kv_caches and StepKernels makes a store that refuses every
  // cache.
  KvStore(KvStoreOptions options, Device* device, MemoryBudget* budget,
          std::function<void(v1::JoinRequest)> send);
  // REQUIRES: no stream uses the store any more.
  ~KvStore();

  // Frees all caches, refuses new ones, and sends nothing after it has returned. Idempotent.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  // Reserves memory before it returns, and answers when it is zeroed.
  void Reserve(const v1::KvReserve& reserve) ABSL_LOCKS_EXCLUDED(mutex_);
  void Open(const v1::KvOpen& open) ABSL_LOCKS_EXCLUDED(mutex_);
  void Settle(const v1::KvSettle& settle) ABSL_LOCKS_EXCLUDED(mutex_);
  // The memory is free when this returns. Waits for a call that is being computed to stop.
  void Free(const v1::KvFree& free) ABSL_LOCKS_EXCLUDED(mutex_);

  // The coordinator is lost; a coordinator has accepted this worker.
  void OnDisconnected() ABSL_LOCKS_EXCLUDED(mutex_);
  void OnRegistered() ABSL_LOCKS_EXCLUDED(mutex_);
  // The worker was ordered to end. Later answers to StepBegin report it. Steps go on until Close.
  void SetLeaving() { leaving_.store(true); }
  bool leaving() const { return leaving_.load(); }
  // Adds the caches that are held to a registration.
  void AddHeldCaches(v1::Register* registration) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports caches in use, and frees orphans.
  void Tick() ABSL_LOCKS_EXCLUDED(mutex_);

  // UNAUTHENTICATED unless the token is valid for the cache. The message and the time do not reveal
  // whether the cache exists.
  absl::Status CheckToken(const v1::StepHello& hello) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Admits a writer's stream and ends an earlier one of the same epoch. `with_token`: the stream's
  // peer is a client, whose token is compared; else the peer has shown the cluster's secret.
  // Errors: UNAUTHENTICATED in the same words for an unknown cache and a wrong token; NOT_FOUND
  // (KV_NOT_FOUND), ABORTED (KV_FENCED), INVALID_ARGUMENT (BAD_CALL), also for a ring in a region
  // that OpenCache did not name.
  absl::StatusOr<std::shared_ptr<KvCache>> Attach(const v1::StepHello& hello, bool with_token,
                                                  const std::shared_ptr<KvStream>& stream)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Null if the device serves no caches.
  KvEngine* engine() { return engine_.get(); }
  absl::Time now() const { return options_.now(); }
  int64_t max_bytes() const { return engine_ == nullptr ? 0 : options_.max_bytes; }

  int64_t count() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<KvCache> Find(const std::string& id) const ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsTokenOf(const v1::StepHello& hello) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<KvCache>> Make(const v1::KvReserve& reserve);
  absl::Status TakeScratch() ABSL_LOCKS_EXCLUDED(mutex_);
  // Unless the store is closed.
  void Send(v1::JoinRequest message) ABSL_LOCKS_EXCLUDED(mutex_);
  void SendReserved(const v1::KvReserve& reserve, const absl::Status& status, int64_t bytes);
  void FreeOne(const std::string& id, const std::string& reason) ABSL_LOCKS_EXCLUDED(mutex_);
  void Loop() ABSL_LOCKS_EXCLUDED(mutex_);

  const KvStoreOptions options_;
  Device* const device_;
  MemoryBudget* const budget_;
  const std::function<void(v1::JoinRequest)> send_;
  absl::Status unserved_;  // why engine_ is null
  std::unique_ptr<KvEngine> engine_;
  std::atomic<bool> leaving_{false};

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<KvCache>> caches_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  MemoryBudget::Reservation scratch_
      ABSL_GUARDED_BY(mutex_);  // of the device, from the first cache
  std::optional<absl::Time> orphaned_since_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  HostQueue zeroing_;
  Wakeup end_ticks_;    // by Close
  std::thread ticker_;  // last: uses the rest
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_KV_STORE_H_
