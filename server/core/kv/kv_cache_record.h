// KvCacheRecord: what the coordinator knows about one K/V cache.
#ifndef RINGATTN_SERVER_CORE_KV_KV_CACHE_RECORD_H_
#define RINGATTN_SERVER_CORE_KV_KV_CACHE_RECORD_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "server/core/events/kv_events.h"

namespace ringattn::server {

enum class KvCacheState : uint8_t {
  kReserving,  // the workers reserve and zero memory
  kAdopting,   // not all ranks have registered with this coordinator
  kIdle,       // no writer
  kOpening,    // the workers fence older writers
  kSettling,   // the workers settle the log
  kOpen,       // a writer may send steps
};

// Open, or about to be.
inline bool HasWriter(KvCacheState state) {
  return state == KvCacheState::kOpening || state == KvCacheState::kSettling ||
         state == KvCacheState::kOpen;
}

struct KvCacheMember {
  ConnectionId connection = 0;  // 0 while adopting: not registered
  std::string worker;           // its name
  int64_t bytes = 0;
  bool answered = false;  // in the current state
  bool leaving = false;   // the worker was ordered to end
  uint64_t committed_step = 0;
  uint64_t complete_step = 0;
  std::string token;  // of this epoch
};

struct KvCacheRecord {
  std::string id;
  std::string principal;  // that may use it
  std::string client;     // that the quota applies to
  std::string request_id;
  uint64_t fingerprint = 0;
  std::shared_ptr<const KvCacheSpec> spec;
  int64_t spec_bytes = 0;  // of the coordinator's memory
  KvPlacement placement;
  std::string placement_reason;
  std::vector<KvCacheMember> members;  // by rank
  KvCacheState state = KvCacheState::kReserving;
  uint64_t epoch = 0;      // newest
  bool same_epoch = true;  // kAdopting: all ranks so far registered the same epoch
  absl::Duration ttl;
  absl::Time step_lease;                          // renewed by steps
  absl::Time hold_lease = absl::InfinitePast();   // renewed by holds
  absl::Time deadline = absl::InfiniteFuture();   // of the answers that the state waits for
  std::vector<uint64_t> creating_calls;           // CreateCache calls that wait
  std::optional<KvWriterRequested> opening;       // the OpenCache call that waits
  v1::Transport transport = v1::TRANSPORT_RELAY;  // of the writer
  std::string transport_reason;
  std::string relay_token;  // of this epoch; empty unless the writer uses the relay
  uint64_t settled_step = 0;
  // As the workers report.
  uint64_t last_step = 0;
  uint64_t blocks_used = 0;
  uint64_t sequences = 0;

  absl::Time lease_end() const { return std::max(step_lease, hold_lease); }
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const KvCacheMember& member : members) bytes += member.bytes;
    return bytes;
  }
  bool IsOn(ConnectionId connection) const {
    return std::any_of(members.begin(), members.end(), [&](const KvCacheMember& member) {
      return member.connection == connection;
    });
  }
  bool has_writer() const { return HasWriter(state); }
};

// Returns the coordinator's memory for a specification.
inline int64_t SpecBytes(const KvCacheSpec& spec) {
  int64_t bytes = static_cast<int64_t>(sizeof(KvCacheSpec) + spec.label.size());
  for (const KvLayerGroup& group : spec.groups) {
    bytes += static_cast<int64_t>(sizeof(KvLayerGroup) + group.layers.size() * sizeof(uint32_t) +
                                  group.sinks.size() * sizeof(float));
  }
  return bytes;
}

inline void FillPlacement(const KvCacheRecord& record, v1::KvPlacement* placement) {
  placement->set_head_parts(record.placement.head_parts);
  placement->set_position_parts(record.placement.position_parts);
  placement->set_block_tokens(static_cast<uint32_t>(record.spec->block_tokens));
  placement->set_reason(record.placement_reason);
  for (const KvCacheMember& member : record.members) placement->add_members(member.worker);
}

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_KV_KV_CACHE_RECORD_H_
