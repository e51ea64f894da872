// RequestStream: one client's Forward or Backward call, from the header to the
// status. It checks the header, announces the request to the core, passes chunks on
// to the members' shard streams and theirs back, and ends as the core decides.
//
// What it holds of a tensor is bounded, whatever the tensor's size:
//   up    kUploadWindowBytes + one chunk, as the client's next message is read only
//         while less than the window waits for the members
//   down  kDownloadWindowBytes + two chunks for the client, and kReadAheadBytes + one
//         chunk for each member
// So a slow client or member stalls this request and no other.
#ifndef RINGATTN_SERVER_EDGE_REQUEST_STREAM_H_
#define RINGATTN_SERVER_EDGE_REQUEST_STREAM_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/core/events.h"
#include "server/edge/core_loop.h"
#include "server/edge/download_merger.h"
#include "server/edge/header_translation.h"
#include "server/edge/request_registry.h"
#include "server/edge/server_metrics.h"
#include "server/edge/shard_client.h"
#include "server/edge/upload_router.h"

namespace ringattn::server {

// What every request needs; all of it outlives the server's calls.
struct RequestContext {
  Limits limits;
  std::string secret;
  absl::Duration retry_after = absl::Seconds(1);
  CoreLoop* core = nullptr;
  RequestRegistry* registry = nullptr;
  ShardChannels* channels = nullptr;
  ServerMetrics* metrics = nullptr;
};

using ByteStreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// Thread safe: gRPC's threads and the core's thread call it, and one lock serves all
// of it. Locks are taken in the order request, shard stream, core queue.
class RequestStream final : public ByteStreamReactor,
                            public ShardStreamOwner,
                            public std::enable_shared_from_this<RequestStream> {
 public:
  static constexpr int64_t kUploadWindowBytes = 2 * kMiB;
  static constexpr int64_t kDownloadWindowBytes = 1 * kMiB;
  static constexpr int64_t kReadAheadBytes = 1 * kMiB;

  // A reactor that lives until gRPC is done with it.
  static ByteStreamReactor* Start(const RequestContext* context, grpc::CallbackServerContext* call,
                                  Direction direction);

  // From the core's thread.
  void Accept(const AcceptRequest& accept) ABSL_LOCKS_EXCLUDED(mutex_);
  void Download(const BeginDownload& begin) ABSL_LOCKS_EXCLUDED(mutex_);
  void Succeed(const FinishRequest& finish) ABSL_LOCKS_EXCLUDED(mutex_);
  void Fail(const Failure& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnTick(absl::Time now, const Coordinator& core) ABSL_LOCKS_EXCLUDED(mutex_);

  // ByteStreamReactor
  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone() override ABSL_LOCKS_EXCLUDED(mutex_);

  // ShardStreamOwner
  void OnShardMessage(int rank, grpc::ByteBuffer message) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnShardWritten(int rank, int64_t payload_bytes) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnShardEnded(int rank, const grpc::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Member {
    std::shared_ptr<ShardStream> stream;
    std::string name;
    bool reading = true;        // a message is asked for
    bool done = false;          // it has sent everything
    int64_t waiting_bytes = 0;  // payload on its way to it
    // Since the last look it took or sent something, or was not waited for all the time.
    bool moved = true;
  };
  struct Outgoing {
    grpc::ByteBuffer message;
    int64_t payload_bytes = 0;
  };

  RequestStream(const RequestContext* context, grpc::CallbackServerContext* call,
                Direction direction);

  // request_stream.cc: the client's side
  void HandleHeader() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Announce(HeaderRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time Deadline(absl::Time now) const;
  // Tells the core that the request is over and stops all traffic; the core answers
  // with Fail(), or with Succeed() if that crossed on the way.
  void GiveUp(Failure why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishCall() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutOffIfStuck(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopShards() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(grpc::ByteBuffer message, int64_t payload_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return gave_up_ || ended_; }

  // request_transfer.cc: tensors
  void OpenShards(const AcceptRequest& accept) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleChunk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RouteChunk(const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PumpDownload() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the core who has been waited for in vain since the last look.
  void LookAtMembers(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool WaitsFor(const Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReportDownload(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TimeToReport(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ShardFailed(int rank, const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendProgress(absl::Time now, const Coordinator& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RequestContext* const context_;
  grpc::CallbackServerContext* const call_;
  const Direction direction_;
  const absl::Time opened_at_;
  StreamId id_ = 0;                      // 0: there were too many streams
  std::shared_ptr<RequestStream> self_;  // until OnDone

  absl::Mutex mutex_;
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);  // the first is being written
  int64_t outgoing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // payload only
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;

  std::optional<HeaderRequest> request_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_progress_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool in_core_ ABSL_GUARDED_BY(mutex_) = false;  // announced and not answered for good
  bool gave_up_ ABSL_GUARDED_BY(mutex_) = false;
  Failure why_ ABSL_GUARDED_BY(mutex_);            // set with gave_up_
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;     // `status_` is final
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // gRPC has the status
  bool cut_off_ ABSL_GUARDED_BY(mutex_) = false;   // gRPC was told to end the call at once
  bool done_ ABSL_GUARDED_BY(mutex_) = false;      // call_ is gone
  absl::Time ended_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);

  std::optional<Plan> plan_ ABSL_GUARDED_BY(mutex_);  // set: accepted
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);
  std::optional<UploadRouter> router_ ABSL_GUARDED_BY(mutex_);
  int64_t upload_waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time progress_reported_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time looked_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::optional<DownloadMerger> merger_ ABSL_GUARDED_BY(mutex_);
  std::optional<BeginDownload> download_ ABSL_GUARDED_BY(mutex_);  // set: downloading
  bool download_reported_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_REQUEST_STREAM_H_
