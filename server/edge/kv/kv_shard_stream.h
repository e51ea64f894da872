// KvShardStream: the coordinator's stream to one rank of a K/V cache (KvShardService.Steps). One
// message is in flight: each request is answered before the next is sent.
#ifndef RINGATTN_SERVER_EDGE_KV_KV_SHARD_STREAM_H_
#define RINGATTN_SERVER_EDGE_KV_KV_SHARD_STREAM_H_

#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/wire/grpc_1_51/resting_threads.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"

namespace ringattn::server {

// Receives a stream's events, from gRPC's threads, never under the stream's lock.
class KvShardStreamOwner {
 public:
  virtual ~KvShardStreamOwner() = default;
  // Answers Send. `response` may be moved from.
  virtual void OnShardAnswer(int rank, v1::StepResponse* response) = 0;
  // The last call. Also after Cancel.
  virtual void OnShardEnded(int rank, const grpc::Status& status) = 0;
};

// Keeps itself and its owner alive until OnShardEnded. Thread safe.
class KvShardStream final : public grpc::ClientBidiReactor<v1::StepRequest, v1::StepResponse> {
 public:
  // Opens the stream with the cluster's secret. Nothing is sent before Send.
  static std::shared_ptr<KvShardStream> Open(std::shared_ptr<KvShardStreamOwner> owner, int rank,
                                             const std::shared_ptr<grpc::Channel>& channel,
                                             const std::string& secret);

  KvShardStream(const KvShardStream&) = delete;
  KvShardStream& operator=(const KvShardStream&) = delete;

  // REQUIRES: the answer to the previous request has arrived.
  void Send(v1::StepRequest request) ABSL_LOCKS_EXCLUDED(mutex_);
  // Idempotent.
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  KvShardStream(std::shared_ptr<KvShardStreamOwner> owner, int rank,
                const std::shared_ptr<grpc::Channel>& channel);

  // Permits the end of the stream: no operation starts any more.
  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One of the two operations of a request is done.
  void Finished(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);

  const wire::ManyCallbacks many_callbacks_;   // of tensors that pass through
  std::shared_ptr<KvShardStreamOwner> owner_;  // until OnDone
  const int rank_;
  const std::unique_ptr<v1::KvShardService::Stub> stub_;
  grpc::ClientContext context_;
  std::shared_ptr<KvShardStream> self_;
  v1::StepRequest request_;
  v1::StepResponse response_;

  absl::Mutex mutex_;
  int pending_ ABSL_GUARDED_BY(mutex_) = 0;  // operations of the request in flight
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_KV_KV_SHARD_STREAM_H_
