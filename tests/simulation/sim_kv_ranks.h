// The ranks of K/V caches on one simulated worker: real step logs (common/kv/step_log), and waiting
// in place of attention.
#ifndef RINGATTN_TESTS_SIMULATION_SIM_KV_RANKS_H_
#define RINGATTN_TESTS_SIMULATION_SIM_KV_RANKS_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/kv/step_log.h"
#include "ringattn/v1/worker_control.pb.h"
#include "tests/simulation/world.h"

namespace ringattn::server::simulation {

// One message of a writer to one rank, and the rank's answer.
struct KvStepMessage {
  std::string cache;
  uint64_t epoch = 0;
  std::string token;
  // One of: a step to begin, or a call of a layer of step `number`.
  std::optional<KvStep> begin;
  uint64_t number = 0;
  uint32_t layer = 0;
};
struct KvStepAnswer {
  absl::Status status;         // UNAVAILABLE: the rank is gone; UNAUTHENTICATED: another token
  bool refused = false;        // of Begin
  uint32_t tables_crc32c = 0;  // of Begin
};

// Not thread safe. Everything is done in order, one after another, as on the engine's thread.
class SimKvRanks {
 public:
  struct Host {
    // Runs in this process, late if it is stopped.
    std::function<void(absl::Duration, std::function<void()>)> later;
    std::function<void(const v1::JoinRequest&)> say;  // to the coordinator, if connected
    std::function<bool()> connected;
    std::function<void(const std::string& cache)> changed;
  };
  struct Rank {
    v1::KvReserve reserve;
    std::unique_ptr<KvStepLog> log;
    std::string token;
    int64_t bytes = 0;
    absl::Time lease_end;  // by its own clock; ends it only without a coordinator
    absl::Time touched_at = absl::InfinitePast();
  };

  // `room`: memory for caches.
  SimKvRanks(World* world, Host host, int64_t room, absl::Duration orphan_time)
      : world_(world), host_(std::move(host)), room_(room), orphan_time_(orphan_time) {}

  // Handles a command of the coordinator; false if it is about something else.
  bool OnMessage(const v1::JoinResponse& message);
  void AddTo(v1::Register* registration) const;
  // The control stream is gone: ranks stay for a while.
  void OnOrphaned();
  // The process has ended.
  void Clear() { ranks_.clear(); }

  // Answers after a while, unless the process ends.
  void Do(const KvStepMessage& message, std::function<void(const KvStepAnswer&)> answer);

  const Rank* Find(const std::string& cache) const;
  int64_t bytes() const;
  size_t size() const { return ranks_.size(); }

 private:
  KvStepAnswer Answer(const KvStepMessage& message);
  void Touch(Rank* rank);
  // Executes `work` after all earlier work.
  void Enqueue(absl::Duration time, std::function<void()> work);

  World* const world_;
  const Host host_;
  const int64_t room_;
  const absl::Duration orphan_time_;
  std::map<std::string, Rank> ranks_;  // by cache
  absl::Time busy_until_ = absl::InfinitePast();
  uint64_t orphaned_ = 0;  // counts losses of the control stream
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_SIM_KV_RANKS_H_
