// The failures of K/V caches that the core reports to clients (kv_cache.proto lists their reasons).
#ifndef RINGATTN_SERVER_CORE_KV_KV_FAILURES_H_
#define RINGATTN_SERVER_CORE_KV_KV_FAILURES_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "server/core/events/kv_events.h"

namespace ringattn::server {

// An unknown cache, or another principal's. The message never contains the id.
Failure KvNotFound();
// `detail`: what happened, e.g. the worker that was lost; may be empty.
Failure KvEnded(KvCacheEnd end, const std::string& detail);
// A newer writer opened the cache.
Failure KvFenced();
// No workers have room now. `needed`: bytes on each of `world_size` workers.
Failure KvMemory(int64_t needed, int world_size, absl::Duration retry_after);
// No workers have room even without other caches and requests.
Failure KvNeverFits(int64_t needed, int world_size, int64_t largest);
// A worker could not reserve memory.
Failure KvReserveRefused(const std::string& worker, const std::string& reason,
                         absl::Duration retry_after);
Failure KvReserveMalformed(const std::string& worker, const std::string& reason);
Failure KvUnsupported(const std::string& worker, const std::string& reason);
// The client's quota of bytes. `client` goes into QuotaFailure.
Failure KvQuota(const std::string& client, int64_t held, int64_t wanted, int64_t limit);
// The client's quota of caches.
Failure KvClientHasTooManyCaches(const std::string& client, int64_t limit);
Failure TooManyKvCaches(int64_t caches, int64_t limit, absl::Duration retry_after);
// The specifications of all caches take too much of the coordinator's memory.
Failure KvSpecsTooLarge(int64_t limit, absl::Duration retry_after);
Failure KvRequestIdReused();
// CreateCacheRequest.divide_blocks with more parts than the blocks can be divided by.
Failure KvBlocksIndivisible(int64_t block_tokens, int position_parts);
// Too few connected workers serve caches.
Failure KvWorkersMissing(int wanted, int connected, absl::Duration retry_after);
// A member by name that is not connected or serves no caches.
Failure KvMemberMissing(const std::string& name);
// A worker was lost, or did not answer in time, before the cache existed.
Failure KvReserveInterrupted(const std::string& worker, const std::string& why,
                             absl::Duration retry_after);
// A worker has not answered in time; it may compute a long call of the earlier writer.
Failure KvBusy(const std::string& worker, absl::Duration waited, absl::Duration retry_after);
// After a restart of the coordinator, not all workers of the cache have joined again.
Failure KvNotYetAdopted(absl::Duration retry_after);
// OpenCacheRequest.answered_step is larger than what the workers have.
Failure KvStepNotAnswered(uint64_t answered_step, uint64_t complete_step);
Failure KvTransportUnavailable(const std::string& why);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_KV_KV_FAILURES_H_
