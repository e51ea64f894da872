// Clients of K/V caches and the rules that hold for them at every step:
//   - only the newest writer gets answers: once OpenCache has been answered, no rank answers an
//     older epoch;
//   - the logs of any two ranks differ by at most one step, and the shorter one has completed what
//     the other has committed;
//   - a step with all answers is kept if its writer claims it, and in any case once the next step
//     was begun;
//   - a sequence has the length of the settled log, or less if a step was undone;
//   - a cache that a healthy service ends was deleted or its lease has ended;
//   - the coordinator and the workers count the same bytes.
#ifndef RINGATTN_TESTS_SIMULATION_KV_WRITERS_H_
#define RINGATTN_TESTS_SIMULATION_KV_WRITERS_H_

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/simulation/control_plane.h"
#include "tests/simulation/sim_worker.h"

namespace ringattn::server::simulation {

// Not thread safe.
class KvWriters {
 public:
  using FindWorker = std::function<SimWorker*(const std::string& name)>;

  KvWriters(World* world, ControlPlane* control, FindWorker find_worker)
      : world_(world), control_(control), find_worker_(std::move(find_worker)) {}

  // Creates a cache and sends some steps.
  void StartRandomCache(int max_world_size);
  void OnAction(const Action& action);
  void OnCoordinatorRestarted();
  // A rank's log has changed.
  void OnRankChanged(const std::string& cache);
  // No call waits for its answer.
  bool AllAnswered() const { return creating_.empty() && opening_.empty(); }

  const std::map<std::string, int64_t>& ends() const { return ends_; }

 private:
  struct Cache {
    std::string principal;
    absl::Duration ttl;
    std::vector<std::string> members;  // by rank; empty: not created
    bool deleted = false;
    bool open_failed = false;             // after it may have fenced the newest writer
    absl::Time renewed;                   // by a step, a hold or an OpenCache
    uint64_t newest_epoch = 0;            // of answered OpenCache calls
    int64_t opens = 0;                    // OpenCache calls
    uint64_t must_have = 0;               // the last step that may not be undone
    std::map<uint64_t, int64_t> lengths;  // after each step of the log
    std::map<uint64_t, int64_t> kept;     // keep_length of each step
    // Lower bounds of ranks' lengths after a step, because a later step was undone.
    std::map<uint64_t, int64_t> least_lengths;
  };
  struct Writer {
    std::string cache;
    uint64_t epoch = 0;
    int64_t opens = 0;                // OpenCache calls of the cache when this one was answered
    std::vector<std::string> tokens;  // by rank
    bool stopped = false;
    uint64_t step = 0;   // begun or being begun
    int64_t length = 0;  // of the sequence, before the step
    KvStep begin;
    std::set<int> awaited;  // ranks
    int layer = -1;         // -1: Begin
    uint32_t checksum = 0;
    bool has_checksum = false;
    int steps_left = 0;
  };

  // A step of a writer, which claims to have all its answers. 0: no claim.
  struct Claim {
    uint64_t step = 0;
    int64_t opens = -1;  // OpenCache calls of the cache when its writer opened it
  };
  void Open(const std::string& cache, const Claim& claim);
  void OpenLater(const std::string& cache, const Claim& claim);
  void OnOpened(uint64_t call, const KvWriterAnswered& answer);
  void NextStep(uint64_t writer);
  void SendToRanks(uint64_t writer);
  void Send(uint64_t writer, int rank, const KvStepMessage& message);
  void OnAnswer(uint64_t writer, int rank, const KvStepMessage& message,
                const KvStepAnswer& answer);
  void OnAllAnswered(uint64_t writer);
  // The writer ends; perhaps another one opens the cache.
  void Stop(uint64_t writer, bool claims);
  std::string WhyIllegalEnd(const Cache& cache, const Failure& failure) const;

  World* const world_;
  ControlPlane* const control_;
  const FindWorker find_worker_;
  std::map<std::string, Cache> caches_;  // by id
  std::map<uint64_t, Writer> writers_;
  std::map<uint64_t, std::string> creating_;  // calls; ids
  struct Opening {
    std::string cache;
    Claim claim;
  };
  std::map<uint64_t, Opening> opening_;  // by call
  uint64_t last_call_ = 0;
  std::map<std::string, int64_t> ends_;
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_KV_WRITERS_H_
