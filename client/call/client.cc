#include "client/api/client.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/call/call_plan.h"
#include "client/call/client_impl.h"
#include "client/call/client_security.h"
#include "client/call/cuda_call.h"
#include "client/call/replayed_call.h"
#include "client/call/staged_call.h"
#include "client/transfer/direct_transfer.h"
#include "client/transfer/grpc_status.h"
#include "common/base/limits.h"
#include "common/process/loopback.h"
#include "common/security/bearer_token.h"
#include "common/security/credentials.h"
#include "common/wire/durations.h"
#include "common/wire/grpc_1_51/grpc_lifetime.h"
#include "common/wire/transport.h"
#include "ringattn/v1/attention.grpc.pb.h"
#include "ringattn/v1/cluster.grpc.pb.h"
#include "ringattn/v1/local_memory.grpc.pb.h"

namespace ringattn::client {
namespace {

// Room in a message for everything except chunk data, and for Accepted and Summary, which grow with
// the ring and its timelines.
constexpr int kMessageSlackBytes = 16 << 20;

// How often idle staging memory is checked (StagingOptions::idle).
constexpr absl::Duration kTrimInterval = absl::Seconds(5);

// Below, tensors in the header take no longer than copies into and out of a region.
constexpr uint64_t kLeastStagedBytes = 64 << 10;

// One connection attempt may take this many times RetryOptions::connect_timeout: a busy machine
// accepts connections late. A call that waits for it ends at its deadline all the same.
constexpr int kAttemptShare = 4;

// The coordinator answers without I/O.
constexpr absl::Duration kAttachDeadline = absl::Seconds(5);

// `connect_time`: limit of one connection attempt.
grpc::ChannelArguments ChannelArgumentsFor(const ClientOptions& options,
                                           absl::Duration connect_time) {
  grpc::ChannelArguments arguments;
  // A chunk, or the result of a layer call (KvCache).
  arguments.SetMaxReceiveMessageSize(std::max(static_cast<int>(options.max_chunk_bytes_down),
                                              static_cast<int>(Limits().max_step_bytes)) +
                                     kMessageSlackBytes);
  wire::SetTransport(&arguments);
  // A restarted server is ready within a second; gRPC's default backoff grows to minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(connect_time)));
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  // Tensors must not pass through a web proxy from the environment.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

std::string RandomRequestId() {
  // std::random_device executes instructions that trap in virtual machines.
  std::array<uint32_t, 4> random;
  // getrandom neither blocks nor returns less for so few bytes.
  if (getrandom(random.data(), sizeof(random), 0) != sizeof(random)) std::abort();
  return absl::StrFormat("c-%08x%08x%08x%08x", random[0], random[1], random[2], random[3]);
}

CallOptions Named(CallOptions options) {
  // A writer without one is rejected.
  if (options.request_id.empty() && !options.writer) options.request_id = RandomRequestId();
  return options;
}

ChunkLimits ChunkLimitsOf(const ClientOptions& options) {
  return {options.max_chunk_bytes_up, options.max_chunk_bytes_down};
}

void SetDeadline(absl::Duration deadline, grpc::ClientContext* context) {
  if (deadline == absl::InfiniteDuration()) return;
  context->set_deadline(absl::ToChronoTime(absl::Now() + deadline));
}

absl::Status InField(absl::string_view field, const absl::Status& status) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", status.message()));
}

void SetUp(absl::Duration deadline, BearerToken* token, grpc::ClientContext* context) {
  SetDeadline(deadline, context);
  if (token != nullptr) token->AddTo(context);
}

// Returns what to stage; nothing if the call cannot use staging or does not gain from it.
template <typename Args, typename Results>
StagingPlan StagingFor(const Args& args, const Results& results, const CallOptions& options,
                       const RegionIndex& regions) {
  const bool asked = options.transport == TransportPreference::kHostMemory;
  const bool may = options.transport == TransportPreference::kAuto;
  if (!asked && !may) return {};
  bool only_dout = false;
  if constexpr (std::is_same_v<Args, BackwardArgs>) {
    // The other tensors are sent only if the residual no longer exists.
    only_dout = !args.residual_handle.empty() && !options.transport_required;
    if (args.residual_handle.empty() && !CheckSizes(args, results, options).ok()) return {};
  } else {
    if (!CheckSizes(args, results, options).ok()) return {};
  }
  StagingPlan plan = PlanStaging(args, results, regions, only_dout);
  if (!asked && plan.input_bytes <= kLeastStagedBytes) return {};
  // Empty tensors may lie in any region, but there must be one.
  if (asked && plan.region_bytes == 0 && regions.Any() == nullptr) plan.region_bytes = 1;
  return plan;
}

// As CheckSizes. With a residual the other tensors may be omitted, so nothing is checked here.
absl::Status CheckGivenSizes(const ForwardArgs& args, const ForwardResults& results,
                             const CallOptions& options) {
  return CheckSizes(args, results, options);
}
absl::Status CheckGivenSizes(const BackwardArgs& args, const BackwardResults& results,
                             const CallOptions& options) {
  if (!args.residual_handle.empty()) return absl::OkStatus();
  return CheckSizes(args, results, options);
}

template <typename Response, typename Call>
absl::StatusOr<Response> Unary(absl::Duration deadline, BearerToken* token, const Call& call) {
  grpc::ClientContext context;
  SetUp(deadline, token, &context);
  Response response;
  const grpc::Status status = call(&context, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  if (target.empty())
    return absl::InvalidArgumentError("target is empty; give the server's address, host:port");
  if (options.channels < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("channels is ", options.channels, "; must be at least 1"));
  if (options.channels_per_worker < 0 ||
      options.channels_per_worker > WorkerChannels::kMostPerWorker) {
    return absl::InvalidArgumentError(absl::StrCat("channels_per_worker is ",
                                                   options.channels_per_worker, "; must be in 0..",
                                                   WorkerChannels::kMostPerWorker));
  }
  if (options.max_chunk_bytes_down < 1 || options.max_chunk_bytes_up > (1u << 30) ||
      options.max_chunk_bytes_down > (1u << 30)) {
    return absl::InvalidArgumentError(
        "max_chunk_bytes_down must be in 1..2^30, max_chunk_bytes_up in 0..2^30");
  }
  wire::KeepGrpcRunning();
  auto impl = std::make_unique<Impl>(options);
  const grpc::ChannelArguments arguments =
      ChannelArgumentsFor(options, kAttemptShare * options.retry.connect_timeout);
  absl::StatusOr<TransportSecurity> security = SecurityOf(options);
  if (!security.ok()) return security.status();
  if (!options.token_file.empty()) {
    if (security->is_plain() && options.credentials == nullptr && !IsLoopback(target)) {
      return absl::InvalidArgumentError(
          absl::StrCat("token_file: the token would be sent in plain text to ", target,
                       ", which is not a loopback address; give tls_ca"));
    }
    auto token = BearerToken::FromFile(options.token_file);
    if (!token.ok()) return InField("token_file", token.status());
    impl->token = *std::move(token);
  }
  for (int i = 0; i < options.channels; ++i) {
    impl->channels.push_back(options.credentials
                                 ? grpc::CreateCustomChannel(target, options.credentials, arguments)
                                 : security->Dial(target, arguments));
  }
  impl->sharer = std::make_unique<CallSharer>(impl->channels[0], impl->token);
  impl->hold = std::make_unique<ResidualHold>(impl->channels[0], impl->token);
  impl->cache_hold = std::make_shared<CacheHold>(impl->channels[0], impl->token);
  // DirectTransfer ends an attempt earlier unless the call requires direct streams.
  const grpc::ChannelArguments worker_arguments =
      ChannelArgumentsFor(options, kRequiredConnectTime);
  impl->workers = std::make_shared<WorkerChannels>(
      [credentials = options.credentials, security = *security,
       arguments = worker_arguments](const std::string& endpoint) {
        return credentials ? grpc::CreateCustomChannel(endpoint, credentials, arguments)
                           : security.Dial(endpoint, arguments);
      },
      options.channels_per_worker);
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

Client::Impl::Impl(const ClientOptions& options)
    : client_options(options),
      staging_pool(
          {.max_bytes = options.staging_bytes}, [this] { return AttachCall(); }, regions),
      copy_pool(CopyPool::DefaultThreads(), kTrimInterval, [this] { staging_pool.Trim(); }),
      preparations(
          [this](std::shared_ptr<const CallPlan> plan, absl::Duration deadline, const Done& done) {
            return StartPreparation(std::move(plan), deadline, done);
          }) {}

Client::Impl::~Impl() {
  preparations.Stop();
  staging_pool.Close();
  registry->CancelAllAndWait();
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() = default;

const std::shared_ptr<grpc::Channel>& Client::Impl::NextChannel() {
  return channels[next_channel.fetch_add(1) % channels.size()];
}

AttemptChannels Client::Impl::NextChannels() {
  return {NextChannel(), sharer.get(), &host_history, workers, token};
}

SharedRegion::AttachCall Client::Impl::AttachCall() {
  return [channel = NextChannel(), token = token](const v1::AttachRequest& request) {
    const auto stub = v1::LocalMemoryService::NewStub(channel);
    return Unary<v1::AttachResponse>(
        kAttachDeadline, token.get(),
        [&](auto* context, auto* response) { return stub->Attach(context, request, response); });
  };
}

PendingCall Client::Impl::Start(absl::StatusOr<PlannedRequest> request, const CallOptions& options,
                                const std::string& why_not_staged, const Done& done) {
  if (!request.ok()) return FailedCall(options.request_id, request.status(), done);
  workers->Prune();
  if (request->plan.host == nullptr && !why_not_staged.empty()) {
    absl::StrAppend(&request->plan.no_host_reason, "; not staged: ", why_not_staged);
  }
  return StartReplayedCall({.request_id = options.request_id,
                            .channels = NextChannels(),
                            .plan = std::make_shared<const CallPlan>(std::move(request->plan)),
                            .fallback = std::move(request->fallback),
                            .registry = registry,
                            .retry = client_options.retry,
                            .deadline = options.deadline,
                            .done = done});
}

PendingCall Client::Impl::StartPreparation(std::shared_ptr<const CallPlan> plan,
                                           absl::Duration deadline, const Done& done) {
  AttemptChannels ways = NextChannels();
  ways.workers = nullptr;
  return StartReplayedCall({.channels = std::move(ways),
                            .plan = std::move(plan),
                            .registry = registry,
                            .retry = client_options.retry,
                            .deadline = deadline,
                            .done = done});
}

template <typename Args, typename Results>
PendingCall Client::Impl::StartCall(const Args& args, const Results& results,
                                    const CallOptions& options, const Done& done) {
  const CallOptions named = Named(options);
  StagingPlan cuda;
  if (absl::Status status = PlanCudaCopies(args, results, *regions, &cuda); !status.ok()) {
    return FailedCall(named.request_id, status, done);
  }
  if (cuda.copied_bytes > 0) {
    return StartWithCuda(args, results, named, std::move(cuda), done);
  }
  StagingPlan plan = StagingFor(args, results, named, *regions);
  const auto bytes = static_cast<int64_t>(plan.region_bytes);
  std::string why_not;
  bool stages = bytes > 0 && staging_pool.MayTake(bytes, &why_not);
  std::shared_ptr<SharedRegion> region;
  if (stages && named.transport == TransportPreference::kAuto) {
    bool prepare = false;
    region = staging_pool.TakeReady(bytes, &prepare);
    if (prepare) copy_pool.Add([this, bytes] { staging_pool.Prepare(bytes); });
    stages = region != nullptr;
    if (!stages) why_not = "no staging memory is ready yet";
  }
  if (!stages) {
    return Start(PlanRequest(args, results, named, ChunkLimitsOf(client_options), *regions), named,
                 why_not, done);
  }
  // The destructor waits for all calls, so `this` outlives the call.
  auto start = [this, args, results, named, plan](uint8_t* base, const std::string& why,
                                                  absl::Duration deadline, const Done& ended) {
    Args in = args;
    Results out = results;
    CallOptions rest = named;
    rest.deadline = deadline;
    if (base != nullptr) PointToStage(plan, base, &in, &out);
    return Start(PlanRequest(in, out, rest, ChunkLimitsOf(client_options), *regions), rest, why,
                 ended);
  };
  return StartStagedCall({.request_id = named.request_id,
                          .plan = std::move(plan),
                          .region = std::move(region),
                          .pool = &staging_pool,
                          .copies = &copy_pool,
                          .registry = registry,
                          .deadline = named.deadline,
                          .start = std::move(start),
                          .done = done});
}

template <typename Args, typename Results>
PendingCall Client::Impl::StartWithCuda(const Args& args, const Results& results,
                                        const CallOptions& options, StagingPlan plan,
                                        const Done& done) {
  if (absl::Status status = CheckGivenSizes(args, results, options); !status.ok()) {
    return FailedCall(options.request_id, status, done);
  }
  const bool wished = options.transport == TransportPreference::kCudaMemory;
  std::string why_not;
  if (!wished && options.transport != TransportPreference::kAuto) {
    why_not = "the caller chose another transport";
  } else if (!AllOnCuda(args, results, *regions)) {
    why_not = "not all tensors lie in CUDA memory";
  } else {
    why_not = CheckAttached(plan, *regions);
  }
  // The destructor waits for all calls, so `this` outlives the call.
  auto start = [this, args, results, options, plan](uint8_t* host, absl::Duration deadline,
                                                    const Done& ended) {
    CallOptions rest = options;
    rest.deadline = deadline;
    if (host == nullptr) {
      return Start(PlanRequest(args, results, rest, ChunkLimitsOf(client_options), *regions), rest,
                   "", ended);
    }
    if (rest.transport == TransportPreference::kCudaMemory)
      rest.transport = TransportPreference::kAuto;
    Args in = args;
    Results out = results;
    PointToStage(plan, host, &in, &out);
    return StartCall(in, out, rest, ended);
  };
  return StartCudaCall({.request_id = options.request_id,
                        .plan = std::move(plan),
                        .why_not = std::move(why_not),
                        .required = wished && options.transport_required,
                        .regions = regions,
                        .copies = &copy_pool,
                        .registry = registry,
                        .deadline = options.deadline,
                        .start = std::move(start),
                        .done = done});
}

PendingCall Client::StartForward(const ForwardArgs& args, const ForwardResults& results,
                                 const CallOptions& options, const Done& done) {
  return impl_->StartCall(args, results, options, done);
}

PendingCall Client::StartBackward(const BackwardArgs& args, const BackwardResults& results,
                                  const CallOptions& options, const Done& done) {
  return impl_->StartCall(args, results, options, done);
}

CallResult Client::Forward(const ForwardArgs& args, const ForwardResults& results,
                           const CallOptions& options) {
  return StartForward(args, results, options).Wait();
}

CallResult Client::Backward(const BackwardArgs& args, const BackwardResults& results,
                            const CallOptions& options) {
  return StartBackward(args, results, options).Wait();
}

absl::StatusOr<PreparedCall> Client::Prepare(const ForwardArgs& args,
                                             const PrepareOptions& options) {
  return impl_->preparations.Prepare(
      PlanPreparation(args, options.ttl, ChunkLimitsOf(impl_->client_options)), options.deadline);
}

absl::StatusOr<PreparedCall> Client::Prepare(const BackwardArgs& args,
                                             const PrepareOptions& options) {
  return impl_->preparations.Prepare(
      PlanPreparation(args, options.ttl, ChunkLimitsOf(impl_->client_options)), options.deadline);
}

absl::StatusOr<v1::GetStatusResponse> Client::GetStatus(const std::string& request_id,
                                                        absl::Duration deadline) {
  const auto stub = v1::AttentionService::NewStub(impl_->NextChannel());
  v1::GetStatusRequest request;
  request.set_request_id(request_id);
  return Unary<v1::GetStatusResponse>(
      deadline, impl_->token.get(),
      [&](auto* context, auto* response) { return stub->GetStatus(context, request, response); });
}

absl::Status Client::Cancel(const std::string& request_id, absl::Duration deadline) {
  const auto stub = v1::AttentionService::NewStub(impl_->NextChannel());
  v1::CancelRequest request;
  request.set_request_id(request_id);
  return Unary<v1::CancelResponse>(deadline, impl_->token.get(),
                                   [&](auto* context, auto* response) {
                                     return stub->Cancel(context, request, response);
                                   })
      .status();
}

absl::Status Client::DeleteResidual(const std::string& residual_handle, absl::Duration deadline) {
  const auto stub = v1::AttentionService::NewStub(impl_->NextChannel());
  v1::DeleteResidualRequest request;
  request.set_residual_handle(residual_handle);
  return Unary<v1::DeleteResidualResponse>(deadline, impl_->token.get(),
                                           [&](auto* context, auto* response) {
                                             return stub->DeleteResidual(context, request,
                                                                         response);
                                           })
      .status();
}

absl::StatusOr<std::vector<std::string>> Client::RenewResiduals(
    const std::vector<std::string>& residual_handles, absl::Duration ttl, absl::Duration deadline) {
  const auto stub = v1::AttentionService::NewStub(impl_->NextChannel());
  v1::RenewResidualsRequest request;
  request.mutable_residual_handles()->Add(residual_handles.begin(), residual_handles.end());
  if (ttl != absl::ZeroDuration()) ringattn::SetDuration(ttl, request.mutable_ttl());
  auto response = Unary<v1::RenewResidualsResponse>(
      deadline, impl_->token.get(),
      [&](auto* context, auto* answer) { return stub->RenewResiduals(context, request, answer); });
  if (!response.ok()) return response.status();
  std::vector<std::string> reasons;
  for (const v1::ResidualStatus& status : response->residuals()) {
    reasons.push_back(status.reason());
  }
  return reasons;
}

void Client::HoldResiduals(const std::vector<std::string>& residual_handles) {
  impl_->hold->Hold(residual_handles);
}

void Client::ReleaseResiduals(const std::vector<std::string>& residual_handles) {
  impl_->hold->Release(residual_handles);
}

absl::Status Client::ResidualHoldTrouble() const { return impl_->hold->trouble(); }

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(absl::Duration deadline) {
  const auto stub = v1::ClusterService::NewStub(impl_->NextChannel());
  return Unary<v1::GetServerInfoResponse>(
      deadline, impl_->token.get(),
      [&](auto* context, auto* response) { return stub->GetServerInfo(context, {}, response); });
}

absl::StatusOr<v1::Topology> Client::GetTopology(absl::Duration deadline) {
  const auto stub = v1::ClusterService::NewStub(impl_->NextChannel());
  auto response = Unary<v1::GetTopologyResponse>(
      deadline, impl_->token.get(),
      [&](auto* context, auto* response) { return stub->GetTopology(context, {}, response); });
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_topology());
}

absl::Status Client::WatchTopology(const std::function<bool(const v1::Topology&)>& on_topology,
                                   absl::Duration deadline) {
  const auto stub = v1::ClusterService::NewStub(impl_->NextChannel());
  grpc::ClientContext context;
  SetUp(deadline, impl_->token.get(), &context);
  const auto reader = stub->WatchTopology(&context, {});
  v1::WatchTopologyResponse response;
  while (reader->Read(&response)) {
    if (!on_topology(response.topology())) {
      context.TryCancel();
      while (reader->Read(&response)) {
      }
      reader->Finish();
      return absl::OkStatus();
    }
  }
  return FromGrpcStatus(reader->Finish());
}

}  // namespace ringattn::client
