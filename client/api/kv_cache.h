// ringattn::client::KvCache: a K/V cache that stays with the workers, opened for writing.
//
//   v1::KvCacheSpec spec;  // layer groups, dtype, blocks
//   auto cache = ringattn::client::KvCache::Create(client.get(), spec);
//   v1::StepBegin step;    // a row for each sequence; `step` itself is numbered by the library
//   (*cache)->BeginStep(step);
//   for (uint32_t layer = 0; layer < layers; ++layer) {
//     ringattn::client::KvLayerArgs args{.layer = layer, .q = ..., .k = ..., .v = ...};
//     auto report = (*cache)->CallLayer(args, {.out = ...});
//   }
//
// docs/inference.md is the guide, proto/ringattn/v1/kv_cache.proto the contract.
// Tests: client/kv/kv_cache_test.cc, tests/python/test_kv_cache.py.
#ifndef RINGATTN_CLIENT_API_KV_CACHE_H_
#define RINGATTN_CLIENT_API_KV_CACHE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/api/client.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn::client {

// ErrorInfo.reason of errors that the library itself returns.
//   FAILED_PRECONDITION  the service refused the step; KvCache::refusal() has the rows
inline constexpr char kStepRefused[] = "STEP_REFUSED";
//   ABORTED  the coordinator was lost during a step by relay, and the workers undid the step. The
//            caller begins the step again, with the lengths of KvCache::sequences()
inline constexpr char kStepUndone[] = "STEP_UNDONE";

// Returns true if another writer has opened the cache (KV_FENCED).
bool IsKvFenced(const absl::Status& status);
// Returns true if the cache no longer exists: lost, inconsistent, expired, deleted or unknown. The
// caller creates another cache and prefills it.
bool IsKvGone(const absl::Status& status);

struct KvCreateOptions {
  std::string request_id = {};  // generated if empty
  // Lease of the cache without a hold and without steps. 0: the server's default.
  absl::Duration ttl = absl::ZeroDuration();
  std::optional<uint32_t> world_size = {};  // unset: the coordinator chooses
  std::vector<std::string> members = {};    // workers by name; empty: any
  // CreateCacheRequest.divide_blocks: position parts divide the blocks of the specification, so
  // that KvCache::spec() has smaller ones. Unset: true unless world_size or members are set. False
  // without them: no position parts.
  std::optional<bool> divide_blocks = {};
  absl::Duration deadline = absl::Seconds(30);
};

struct KvOpenOptions {
  // kAuto: host memory if all workers of the cache are on this machine and take it, otherwise
  // direct streams if the workers are reachable, otherwise the relay. kHostMemory, kDirect and
  // kRelay use only that transport. kCudaMemory is INVALID_ARGUMENT.
  TransportPreference transport = TransportPreference::kAuto;
  // Keeps the cache, regardless of its ttl, until it is closed or the client is destroyed. If the
  // process dies, the lease ends within Limits.residual_hold_grace.
  bool hold = true;
  // The last step of which the caller has every result. 0: unknown.
  uint64_t answered_step = 0;
  // How long a call reopens broken streams before it returns the error.
  absl::Duration recovery_time = absl::Seconds(10);
  absl::Duration deadline = absl::Seconds(30);
};

struct KvCallOptions {
  absl::Duration deadline = absl::InfiniteDuration();
  // Called about every 50 ms on the calling thread while a call waits. If it returns true, the call
  // returns CANCELLED. The same call may be made again.
  std::function<bool()> interrupted = {};
};

// Tensors of one layer call, for all heads and all rows, rows one after another. The caller's
// memory, which the library reads only during the call.
//   q     [q_tokens, num_heads, head_dim], the cache's dtype
//   k, v  [append_tokens, num_kv_heads, head_dim and head_dim_v], the cache's dtype. Both empty:
//   the
//         call only reads, which needs that layer's append of this step, unless no row appends
struct KvLayerArgs {
  uint32_t layer = 0;
  v1::KvOutput output = v1::KV_OUTPUT_OUT;
  ConstBytes q = {}, k = {}, v = {};
};

// Memory for the results of a layer call.
//   out  [q_tokens, num_heads, head_dim_v], the cache's dtype; fp32 for KV_OUTPUT_PARTIAL
//   lse  [num_heads, q_tokens] fp32, natural logarithm; OUT_AND_LSE and PARTIAL only
struct KvLayerResults {
  MutableBytes out = {};
  MutableBytes lse = {};
};

struct KvLayerReport {
  // Time of the slowest worker for the append and the attention, without waits and transfers.
  absl::Duration device_time;
  // Tensor bytes that the call moved, over all ranks.
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

// The writer of one cache. Thread safe, except for refusal(); calls exclude one another.
//
// Every call sends its messages and waits for all workers. If a stream breaks, the library reopens
// all streams in the same epoch and sends the step's description and the call again; repeated
// messages change nothing. After any other error the caller may repeat the call, unless IsKvFenced
// or IsKvGone.
class KvCache {
 public:
  // Reserves a cache without opening it. Errors: as Create's.
  static absl::StatusOr<v1::CreateCacheResponse> Reserve(Client* client,
                                                         const v1::KvCacheSpec& spec,
                                                         const KvCreateOptions& options = {});
  // Reserves a cache and opens it. Errors: those of kv_cache.proto; INVALID_ARGUMENT naming the
  // field, before anything is sent. `client` is used only during the call.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(Client* client,
                                                         const v1::KvCacheSpec& spec,
                                                         const KvCreateOptions& create = {},
                                                         const KvOpenOptions& open = {});
  // Opens an existing cache and fences its earlier writer.
  static absl::StatusOr<std::unique_ptr<KvCache>> Open(Client* client, const std::string& cache_id,
                                                       const KvOpenOptions& options = {});
  // The caller's caches, by id. The service identifies a caller without authentication by its
  // connection, so it lists only what this client has created.
  static absl::StatusOr<std::vector<v1::KvCacheInfo>> List(Client* client, absl::Duration deadline);
  // Frees a cache. OK if it has ended already; NOT_FOUND if it is unknown.
  static absl::Status Delete(Client* client, const std::string& cache_id, absl::Duration deadline);

  // Closes the cache; it lives on for its ttl.
  ~KvCache();

  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const std::string& id() const;
  const v1::KvCacheSpec& spec() const;  // defaults resolved
  const v1::KvPlacement& placement() const;
  uint64_t epoch() const;
  v1::Transport transport() const;  // RELAY, DIRECT or HOST_MEMORY
  std::string transport_reason() const;
  int64_t bytes_per_worker() const;

  // SEQUENCES numbering: every sequence with its length after the last accepted step.
  std::map<uint64_t, uint64_t> sequences() const;
  // The number of the step in progress, or of the last one; 0 before the first step.
  uint64_t step() const;
  // After the last accepted step, on the rank with the fewest.
  uint64_t blocks_free() const;
  // As of the last accepted step: a worker of the cache was ordered to end. The cache is lost
  // (KV_LOST) when the worker ends; prefill another cache before that.
  bool leaving() const;

  // Describes the next step and commits the one before. Sends nothing: the description travels with
  // the first layer call, which reports its refusal. begin.step is ignored. Errors:
  // INVALID_ARGUMENT naming the field; FAILED_PRECONDITION, STEP_ORDER, while rows append and some
  // layers have not been called.
  absl::Status BeginStep(const v1::StepBegin& begin);

  // Appends and attends for one layer. Errors: FAILED_PRECONDITION, kStepRefused, after which
  // BeginStep may describe another step; INVALID_ARGUMENT, before anything is sent, for wrong
  // sizes; those of kv_cache.proto; DEADLINE_EXCEEDED; CANCELLED.
  absl::StatusOr<KvLayerReport> CallLayer(const KvLayerArgs& args, const KvLayerResults& results,
                                          const KvCallOptions& options = {});

  // Sends the step's description, if no layer call has, and commits the step. Errors: as
  // CallLayer's. OK if no step is in progress.
  absl::Status CommitStep(const KvCallOptions& options = {});

  // Executes commands (fork, drop) as a step of their own and commits it.
  absl::Status RunCommands(const std::vector<v1::KvCommand>& commands,
                           const KvCallOptions& options = {});

  // The step that the service refused last. Valid until the next call.
  const v1::StepRefused& refusal() const;

  // Exchanges a small message on the streams of the layer calls, for measurements. Requires that no
  // step is in progress.
  absl::Status RoundTrip(const KvCallOptions& options = {});

  // Ends the streams and the hold. The cache lives on for its ttl. Idempotent; later calls return
  // FAILED_PRECONDITION.
  void Close();
  // Closes and frees the cache.
  absl::Status Delete(absl::Duration deadline = absl::Seconds(10));

 private:
  class Impl;
  explicit KvCache(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_KV_CACHE_H_
