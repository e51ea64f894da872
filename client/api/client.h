// ringattn::client::Client: attention as a remote call, over memory that the caller owns.
//
//   auto client = ringattn::client::Client::Connect("127.0.0.1:7700");
//   ringattn::client::ForwardArgs args;  // shape, dtype, options, q, k, v
//   ringattn::client::ForwardResults results{.out = ..., .lse = ...};
//   ringattn::client::CallResult report = (*client)->Forward(args, results);
//   if (!report.ok()) std::cerr << ringattn::client::FormatError(report.status());
//
// A whole program: client/examples/forward_example.cc.
#ifndef RINGATTN_CLIENT_API_CLIENT_H_
#define RINGATTN_CLIENT_API_CLIENT_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/api/error.h"
#include "client/call/call_registry.h"
#include "client/call/operation.h"
#include "client/call/residual_hold.h"
#include "client/call/retry_policy.h"
#include "client/memory/copy_pool.h"
#include "client/memory/region_index.h"
#include "client/memory/staging_pool.h"
#include "client/transfer/worker_channels.h"
#include "common/security/bearer_token.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::client {

struct PlannedRequest;  // call_plan.h
struct StagingPlan;     // staged_operation.h

struct ClientOptions {
  // Connections to the coordinator. Calls use them in turn, one each.
  int channels = 4;
  // Connections to each worker that tensors go straight to (TransportPreference), 16 at most. 0: as
  // many as serve a call best, by the number of its workers and of this machine's cores.
  int channels_per_worker = 0;
  // TLS, with files in PEM that are read again when they change; plain text without tls_ca.
  std::string tls_ca = {};    // authorities: the server's certificate must lead to one of them
  std::string tls_cert = {};  // the client's own certificate, where the server asks for one,
  std::string tls_key = {};   // and its key, without a pass phrase
  // The name that the server's certificate is for, where that is not the target's host; workers'
  // certificates are then for it too.
  std::string tls_server_name = {};
  // A file with the bearer token that every call shows. Read for each call, so a token that is
  // replaced is shown from the next call on. Not in plain text, but to loopback.
  std::string token_file = {};
  // Instead of all tls_ fields.
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;
  // 0: as the server recommends (Accepted.recommended_chunk_bytes, 1 MiB). More is slower, less
  // is for slow lines: a chunk should not take longer than 5 s. The server takes 16 MiB.
  uint32_t max_chunk_bytes_up = 0;
  uint32_t max_chunk_bytes_down = 1 << 20;
  // Of regions in which the library puts tensors that lie in none, for calls that may go by host
  // memory: together no more than this, nor than half of the free memory; idle ones go back to the
  // system after 20 s. 0: nothing is staged.
  int64_t staging_bytes = int64_t{4} << 30;
  RetryOptions retry = {};
};

// What the tls_ fields say; plain text without them. Errors: INVALID_ARGUMENT, naming the field.
absl::StatusOr<TransportSecurity> SecurityOf(const ClientOptions& options);

// Calls may overlap. Thread safe.
class Client {
 public:
  // Cancels what is still in flight and waits for its end. Not from a `done`.
  ~Client();

  // Does not dial yet. Errors: INVALID_ARGUMENT for an empty target, no channels, TLS files or a
  // token of no use (the message names the field and the file).
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options = {});

  // --- Attention ---------------------------------------------------------------
  // The memory that args and results point to must stay valid and, for the results,
  // untouched until the call has ended; args and results themselves need not.
  // Replayed under one request_id after ABORTED, UNAVAILABLE and, where the server
  // says when, RESOURCE_EXHAUSTED (retry_policy.h); not where TLS cannot come about, which is
  // UNAVAILABLE with the reason TLS_HANDSHAKE_FAILED (error.h). After an error the results'
  // contents are worthless.
  // Errors: those of proto/ringattn/v1/attention.proto, with details (error.h);
  // INVALID_ARGUMENT, before anything is sent, where a buffer has not the size that
  // shape and dtype give it; INTERNAL if the server breaks the protocol; DATA_LOSS if a result
  // arrives damaged.
  CallResult Forward(const ForwardArgs& args, const ForwardResults& results,
                     const CallOptions& options = {});
  CallResult Backward(const BackwardArgs& args, const BackwardResults& results,
                      const CallOptions& options = {});

  // The same without waiting. `done`, if given, is called once when the call ends, on
  // one of gRPC's threads; it must not block.
  using Done = std::function<void(const CallResult&)>;
  Operation StartForward(const ForwardArgs& args, const ForwardResults& results,
                         const CallOptions& options = {}, const Done& done = nullptr);
  Operation StartBackward(const BackwardArgs& args, const BackwardResults& results,
                          const CallOptions& options = {}, const Done& done = nullptr);

  // --- Operations and cluster --------------------------------------------------
  // Blocking, not replayed. Errors: as the protos say.
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const std::string& request_id,
                                                  absl::Duration deadline);
  absl::Status Cancel(const std::string& request_id, absl::Duration deadline);
  // Lets go of what a Forward with CallOptions::retain left.
  absl::Status DeleteResidual(const std::string& residual_handle, absl::Duration deadline);
  // Keeps residuals for `ttl` from now on; 0: as long as the server thinks right. For each an empty
  // string, or the reason why it is gone. At most 1,024 at a time.
  absl::StatusOr<std::vector<std::string>> RenewResiduals(
      const std::vector<std::string>& residual_handles, absl::Duration ttl,
      absl::Duration deadline);
  // Keeps residuals, whatever their ttl, until they are read, deleted or released, for as long as
  // this client is there; when it goes, or its process dies, they go within
  // Limits.residual_hold_grace. Does not block: what the server does not know of yet lasts for the
  // time that it has.
  void HoldResiduals(const std::vector<std::string>& residual_handles) {
    hold_->Hold(residual_handles);
  }
  // Those that were used up need not be released, but are remembered until they are.
  void ReleaseResiduals(const std::vector<std::string>& residual_handles) {
    hold_->Release(residual_handles);
  }
  // Why none is held at the moment; OK while they are. UNIMPLEMENTED of an older server.
  absl::Status ResidualHoldTrouble() const { return hold_->trouble(); }
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(absl::Duration deadline);
  absl::StatusOr<v1::Topology> GetTopology(absl::Duration deadline);

  // Calls `on_topology` with every state until it returns false (then OK) or the
  // stream ends (then its error).
  absl::Status WatchTopology(const std::function<bool(const v1::Topology&)>& on_topology,
                             absl::Duration deadline);

 private:
  friend class Region;
  friend class CudaRegion;

  explicit Client(const ClientOptions& options);

  const std::shared_ptr<grpc::Channel>& NextChannel();
  // For regions, which may outlive this client.
  SharedRegion::AttachCall AttachCall();
  const std::shared_ptr<RegionIndex>& regions() const { return regions_; }
  // Of tensors some of which lie in CUDA memory, those of `copies`: there, or on copies of them.
  // `Args`, `Results`: of Forward or Backward.
  template <typename Args, typename Results>
  Operation StartWithCuda(const Args& args, const Results& results, const CallOptions& options,
                          StagingPlan copies, const Done& done);
  // Staged if that makes sense.
  template <typename Args, typename Results>
  Operation StartCall(const Args& args, const Results& results, const CallOptions& options,
                      const Done& done);
  // REQUIRES: options.request_id is set. `why_not_staged` goes into the report.
  Operation Start(absl::StatusOr<PlannedRequest> request, const CallOptions& options,
                  const std::string& why_not_staged, const Done& done);

  const ClientOptions options_;
  const wire::KeepAwake keep_awake_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // fixed by Connect
  std::shared_ptr<WorkerChannels> workers_;               // likewise
  std::shared_ptr<BearerToken> token_;                    // likewise; null: none is shown
  std::unique_ptr<ResidualHold> hold_;                    // likewise
  std::atomic<uint64_t> next_channel_{0};
  const std::shared_ptr<RegionIndex> regions_ = std::make_shared<RegionIndex>();
  StagingPool staging_;
  CopyPool copies_;  // uses staging_
  const std::shared_ptr<CallRegistry> registry_ = std::make_shared<CallRegistry>();
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_CLIENT_H_
