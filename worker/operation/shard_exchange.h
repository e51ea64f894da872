// ShardExchange: one Exchange call, from OpenShard in its metadata to ShardDone. It reads no
// message before the call is admitted.
#ifndef RINGATTN_WORKER_OPERATION_SHARD_EXCHANGE_H_
#define RINGATTN_WORKER_OPERATION_SHARD_EXCHANGE_H_

#include <memory>
#include <optional>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringattn/v1/shard.pb.h"
#include "worker/operation/cut_off.h"
#include "worker/operation/shard_access.h"
#include "worker/operation/shard_hooks.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// Thread safe: gRPC's reactions and the operation's notifications arrive on any thread. At most one
// read and one write are outstanding, so HTTP/2 flow control reaches both peers.
class ShardExchange : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                      public OperationListener {
 public:
  // All arguments must outlive the call. The object deletes itself when the call is done.
  ShardExchange(grpc::CallbackServerContext* context, ShardAccess* access,
                const ShardServiceHooks* hooks);

  // The method's handler must call exactly one of these before it returns.
  void Begin() ABSL_LOCKS_EXCLUDED(mutex_);
  void Reject(grpc::Status status) ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void OnOperationChanged() override;

 private:
  // Copies the received chunk into the operation's input.
  grpc::Status HandleMessage();

  // Starts the next write or finishes the call, if either is due.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns false if there is nothing to send yet, or if sending has failed.
  bool NextMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeChunk(const Download::HostRange& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Fail(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  grpc::CallbackServerContext* const context_;
  ShardAccess* const access_;
  const ShardServiceHooks* const hooks_;

  grpc::ByteBuffer incoming_;  // belongs to the outstanding read
  // Written only by Begin, before opened_ is set and before anything is read.
  std::unique_ptr<ShardLease> lease_;
  std::shared_ptr<ShardOperation> operation_;
  int64_t max_chunk_bytes_ = 0;
  bool with_crc32c_ = false;

  absl::Mutex mutex_;
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;
  bool opened_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called
  CutOff cut_off_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<ShardLease::OutputRange> outputs_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Download> download_ ABSL_GUARDED_BY(mutex_);  // of outputs_
  int64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t in_flight_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the outstanding write
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_SHARD_EXCHANGE_H_
