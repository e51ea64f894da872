// ringattn::client::Client: attention as a remote call on memory that the caller owns.
//
//   auto client = ringattn::client::Client::Connect("127.0.0.1:7700");
//   ringattn::client::ForwardArgs args;  // shape, dtype, options, q, k, v
//   ringattn::client::ForwardResults results{.out = ..., .lse = ...};
//   ringattn::client::CallResult report = (*client)->Forward(args, results);
//   if (!report.ok()) std::cerr << ringattn::client::FormatError(report.status());
//
// client/examples/forward_example.cc is a complete program.
// Tests: client/call/client_test.cc, residual_call_test.cc, region_call_test.cc,
// concurrent_chunks_test.cc, prepared_call_test.cc.
#ifndef RINGATTN_CLIENT_API_CLIENT_H_
#define RINGATTN_CLIENT_API_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/api/error.h"
#include "client/api/pending_call.h"
#include "client/api/prepared_call.h"
#include "client/api/retry_options.h"
#include "ringattn/v1/cluster.pb.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace ringattn::client {

struct ClientOptions {
  // Connections to the coordinator. Calls use them in turn, one each, but calls of a single message
  // share a stream of the first one.
  int channels = 4;
  // Connections to each worker for direct streams, at most 16. 0: the library chooses by the
  // number of workers and of this machine's cores.
  int channels_per_worker = 0;
  // TLS, with PEM files that are reloaded when they change. Plain text if tls_ca is empty.
  std::string tls_ca = {};    // authorities that sign the server's certificate
  std::string tls_cert = {};  // the client's certificate, if the server requires one
  std::string tls_key = {};   // the private key of tls_cert, without a pass phrase
  // The name in the server's certificate, if it differs from the target's host. The library expects
  // the same name in the workers' certificates.
  std::string tls_server_name = {};
  // A file with the bearer token that every call sends. The library reads it for each call, so a
  // new token takes effect with the next call. Plain text is allowed only to loopback addresses.
  std::string token_file = {};
  // Replaces all tls_ fields.
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;
  // Largest chunk to the server. 0: its recommendation (Accepted.recommended_chunk_bytes, 1 MiB).
  // Larger chunks are slower; smaller ones suit slow links, where a chunk should take less than
  // 5 s. The server accepts at most 16 MiB.
  uint32_t max_chunk_bytes_up = 0;
  uint32_t max_chunk_bytes_down = 1 << 20;
  // Limit of all staging regions together, in addition to half of the free memory. The library
  // copies tensors outside regions through staging regions for calls that may use host memory, and
  // frees a staging region after 20 s without use. 0: no staging.
  int64_t staging_bytes = int64_t{4} << 30;
  RetryOptions retry = {};
};

// A connection to one service. Calls may overlap. Thread safe.
class Client {
 public:
  // Cancels all calls in flight and waits until they have ended. Must not run in a Done callback.
  ~Client();

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Returns a client that connects with its first call. Errors: INVALID_ARGUMENT, naming the field
  // and the file, for an empty target, an option out of range, or unusable TLS or token files.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options = {});

  // --- Attention ---------------------------------------------------------------
  // The memory that args and results refer to must stay valid until the call has ended, and other
  // code must not write to it or read the results. args and results themselves are copied.
  //
  // The library replays a call under the same request_id after ABORTED, after UNAVAILABLE, and
  // after RESOURCE_EXHAUSTED with RetryInfo. It does not replay after a failed TLS handshake
  // (kTlsHandshakeFailed). After an error the contents of the results are undefined.
  //
  // Errors: those of proto/ringattn/v1/attention.proto, with details (error.h);
  // INVALID_ARGUMENT, before anything is sent, for a buffer whose size differs from what shape and
  // dtype require; INTERNAL if the server violates the protocol; DATA_LOSS if a result arrives
  // damaged.
  CallResult Forward(const ForwardArgs& args, const ForwardResults& results,
                     const CallOptions& options = {});
  CallResult Backward(const BackwardArgs& args, const BackwardResults& results,
                      const CallOptions& options = {});

  // The same without waiting. The library calls `done`, if given, once when the call ends, on a
  // thread of gRPC. `done` must not block.
  using Done = std::function<void(const CallResult&)>;
  PendingCall StartForward(const ForwardArgs& args, const ForwardResults& results,
                           const CallOptions& options = {}, const Done& done = nullptr);
  PendingCall StartBackward(const BackwardArgs& args, const BackwardResults& results,
                            const CallOptions& options = {}, const Done& done = nullptr);

  // Prepares Forward or Backward calls that are equal to `args` except for their tensors: the
  // workers build the program, reserve the memory and prepare the kernel calls before the first
  // call, and keep this part while the handle exists. Calls then find it, over any transport.
  //
  //   auto prepared = client->Prepare(args);
  //   for (...) client->Forward(args, results);
  //
  // Only the presence of buffers in `args` counts: has_forward_result and DLSE make a Backward
  // another one. No memory is read, and nothing is sent or run. The part is a cache: a call that
  // does not find it prepares it itself.
  //
  // Errors: as Forward, without those of buffers; FAILED_PRECONDITION, NOT_KEPT, if a worker may
  // not keep a part of this size; INVALID_ARGUMENT for a residual_handle, because parts with
  // residuals are not kept, and for a ttl beyond Limits.max_prepare_ttl.
  absl::StatusOr<PreparedCall> Prepare(const ForwardArgs& args, const PrepareOptions& options = {});
  absl::StatusOr<PreparedCall> Prepare(const BackwardArgs& args,
                                       const PrepareOptions& options = {});

  // --- Requests, residuals and cluster -----------------------------------------
  // These block and are not replayed. Errors: those of the protos.
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const std::string& request_id,
                                                  absl::Duration deadline);
  absl::Status Cancel(const std::string& request_id, absl::Duration deadline);
  // Frees a residual that a Forward with CallOptions::retain left.
  absl::Status DeleteResidual(const std::string& residual_handle, absl::Duration deadline);
  // Extends the lifetime of at most 1,024 residuals to `ttl` from now; 0: the server's default.
  // Returns for each handle an empty string, or the reason why the residual no longer exists.
  absl::StatusOr<std::vector<std::string>> RenewResiduals(
      const std::vector<std::string>& residual_handles, absl::Duration ttl,
      absl::Duration deadline);
  // Keeps residuals, regardless of their ttl, until they are read, deleted or released, or this
  // client is destroyed. If the process dies, they expire within Limits.residual_hold_grace. Does
  // not block: until the server has confirmed a hold, the residual's own ttl applies.
  void HoldResiduals(const std::vector<std::string>& residual_handles);
  // Ends holds. The client remembers the handles of consumed residuals until they are released.
  void ReleaseResiduals(const std::vector<std::string>& residual_handles);
  // Returns OK while holds are in effect, or the reason why none is. UNIMPLEMENTED: the server does
  // not support holds.
  absl::Status ResidualHoldTrouble() const;
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(absl::Duration deadline);
  absl::StatusOr<v1::Topology> GetTopology(absl::Duration deadline);

  // Calls `on_topology` with every state. Returns OK after it has returned false, or the error with
  // which the stream ended.
  absl::Status WatchTopology(const std::function<bool(const v1::Topology&)>& on_topology,
                             absl::Duration deadline);

 private:
  friend class Region;
  friend class CudaRegion;
  friend class KvCache;

  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_CLIENT_H_
