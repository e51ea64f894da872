// Client::Impl: the channels, regions, pools and calls in flight of one client.
#ifndef RINGATTN_CLIENT_CALL_CLIENT_IMPL_H_
#define RINGATTN_CLIENT_CALL_CLIENT_IMPL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/channel.h>

#include "absl/status/statusor.h"
#include "client/api/client.h"
#include "client/call/attempt.h"
#include "client/call/cache_hold.h"
#include "client/call/call_plan.h"
#include "client/call/call_registry.h"
#include "client/call/preparations.h"
#include "client/call/residual_hold.h"
#include "client/call/staged_call.h"
#include "client/memory/copy_pool.h"
#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"
#include "client/memory/staging_pool.h"
#include "client/stream/call_sharer.h"
#include "client/transfer/worker_channels.h"
#include "common/security/bearer_token.h"
#include "common/wire/grpc_1_51/keep_awake.h"

namespace ringattn::client {

// Thread safe.
struct Client::Impl {
  explicit Impl(const ClientOptions& options);
  // Cancels all calls and waits until they have ended.
  ~Impl();

  const std::shared_ptr<grpc::Channel>& NextChannel();
  AttemptChannels NextChannels();
  // Returns LocalMemoryService.Attach as a function that may outlive this client.
  SharedRegion::AttachCall AttachCall();

  // Starts a call: on CUDA memory, staged, or on its tensors in place.
  // `Args`, `Results`: of Forward or Backward.
  template <typename Args, typename Results>
  PendingCall StartCall(const Args& args, const Results& results, const CallOptions& options,
                        const Done& done);
  // Starts a call of which the tensors in `plan` lie in CUDA memory: in place if possible,
  // otherwise on copies in host memory.
  template <typename Args, typename Results>
  PendingCall StartWithCuda(const Args& args, const Results& results, const CallOptions& options,
                            StagingPlan plan, const Done& done);
  // Starts a planned call. `why_not_staged` goes into the report. Requires options.request_id.
  PendingCall Start(absl::StatusOr<PlannedRequest> request, const CallOptions& options,
                    const std::string& why_not_staged, const Done& done);

  // Starts a call that only prepares (PlanPreparation).
  PendingCall StartPreparation(std::shared_ptr<const CallPlan> plan, absl::Duration deadline,
                               const Done& done);

  const ClientOptions client_options;
  const wire::KeepAwake keep_awake;
  // Set by Connect and constant afterwards.
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  std::unique_ptr<CallSharer> sharer;  // on the first channel, for the calls of all channels
  HostHistory host_history;
  std::shared_ptr<WorkerChannels> workers;
  std::shared_ptr<BearerToken> token;  // null: calls send none
  std::unique_ptr<ResidualHold> hold;
  std::shared_ptr<CacheHold> cache_hold;  // shared with K/V caches, which may outlive the client

  std::atomic<uint64_t> next_channel{0};
  const std::shared_ptr<RegionIndex> regions = std::make_shared<RegionIndex>();
  StagingPool staging_pool;
  CopyPool copy_pool;  // uses staging_pool
  const std::shared_ptr<CallRegistry> registry = std::make_shared<CallRegistry>();
  Preparations preparations;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CLIENT_IMPL_H_
