// The rule that chooses the workers of a new K/V cache, independent of the source of the facts.
// Tests: kv_members_test.
#ifndef RINGATTN_SERVER_CORE_KV_KV_MEMBERS_H_
#define RINGATTN_SERVER_CORE_KV_KV_MEMBERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/kv/cache_spec.h"
#include "server/core/kv/kv_caches.h"
#include "server/core/kv/kv_step_time.h"

namespace ringattn::server {

// One connected worker that may hold caches.
struct KvSite {
  ConnectionId connection = 0;
  std::string worker;
  int64_t memory_bytes = 0;        // 0: unknown; the worker decides at KvReserve
  int64_t max_kv_cache_bytes = 0;  // of all its caches together
  int64_t kv_cache_bytes = 0;
  int64_t request_bytes = 0;   // of operations, and of residuals that they read
  int64_t residual_bytes = 0;  // that may be evicted
  KvWorkerRates rates;

  // Memory for another cache if its residuals are evicted, and if they are kept.
  int64_t Room() const;
  int64_t RoomBesideResiduals() const;
  // Memory for a cache on the worker when it is otherwise empty.
  int64_t MaxRoom() const;
};

struct KvMembersRequest {
  std::optional<int> world_size;     // unset: ChooseKvMembers chooses
  std::vector<std::string> members;  // by name, by rank; empty: any
  bool divide_blocks = false;        // as of CreateCacheRequest
  int max_world_size = 1;
  absl::Duration retry_after;
};

// Without world_size and members it takes the fewest workers that have room, among the world sizes
// that divide the kv heads of every group, so that no results are merged.
//
// With divide_blocks and fewer kv heads than workers, other world sizes are candidates, too, if the
// blocks can be divided by their position parts. The fewest workers without position parts give way
// to a candidate if they have no room, or if PredictKvStepSeconds is below kKvPartsGain of theirs.
// The candidate with the fewest workers is taken whose time is within kKvPartsMargin of the
// shortest.
//
// Workers with more room go first, so that caches spread.
std::variant<KvReservation, Failure> ChooseKvMembers(const KvCacheSpec& spec,
                                                     const KvMembersRequest& request,
                                                     std::vector<KvSite> sites);

inline constexpr double kKvPartsGain = 0.8;
inline constexpr double kKvPartsMargin = 1.1;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_KV_KV_MEMBERS_H_
