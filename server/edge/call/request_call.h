// RequestCall: one client's Forward or Backward call, from the header to the status. It checks
// the header, announces the request to the core, opens a data plane when the core accepts, and
// ends as the core decides. Tensors are the data plane's.
#ifndef RINGATTN_SERVER_EDGE_CALL_REQUEST_CALL_H_
#define RINGATTN_SERVER_EDGE_CALL_REQUEST_CALL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/events/events.h"
#include "server/edge/call/call_header.h"
#include "server/edge/call/call_state.h"
#include "server/edge/call/request_context.h"
#include "server/edge/call/upload_meter.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/header/header_translation.h"

namespace ringattn::server {

using ByteStreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// Thread safe: gRPC's threads and the core's thread call it. Its lock guards where the call
// stands and is held for moments: headers are checked, payload is moved and gRPC's operations
// are started without it, so the core's thread never waits for any of that. Locks are taken in
// the order data plane, call, core queue; but the data plane's Look, Wants, complete and totals
// may be asked under the call's lock.
class RequestCall final : public ByteStreamReactor,
                          public TransferListener,
                          public std::enable_shared_from_this<RequestCall> {
 public:
  // A reactor that lives until gRPC is done with it.
  static ByteStreamReactor* Start(const RequestContext* context, grpc::CallbackServerContext* call,
                                  Direction direction);

  // From the core's thread.
  void Accept(const AcceptRequest& accept) ABSL_LOCKS_EXCLUDED(mutex_);
  void Download(const BeginDownload& begin) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance(const TransferAdvanced& advanced) ABSL_LOCKS_EXCLUDED(mutex_);
  void Succeed(const FinishRequest& finish) ABSL_LOCKS_EXCLUDED(mutex_);
  void Fail(const Failure& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnTick(absl::Time now, const Coordinator& core) ABSL_LOCKS_EXCLUDED(mutex_);

  // From any thread: its tensor bytes so far.
  TransferTotals Totals() ABSL_LOCKS_EXCLUDED(mutex_);
  // From any thread: makes room for others, unless its header has come.
  void Evict() ABSL_LOCKS_EXCLUDED(mutex_);

  // ByteStreamReactor
  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone() override ABSL_LOCKS_EXCLUDED(mutex_);

  // TransferListener
  void OnRoom() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnOutput(grpc::ByteBuffer message, int64_t payload_bytes) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDrained() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnMemberFailed(int rank, const std::string& reason) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Outgoing {
    grpc::ByteBuffer message;
    int64_t payload_bytes = 0;
  };
  // What a decision under the lock leaves to be done without it.
  struct Todo {
    std::shared_ptr<DataPlane> stop = nullptr;
    std::function<void()> soon = nullptr;  // on one of gRPC's threads
    bool read = false;
    bool write = false;
    std::optional<grpc::Status> finish = std::nullopt;
  };

  RequestCall(const RequestContext* context, grpc::CallbackServerContext* call, Direction direction,
              Caller caller);

  void Begin(const RequestRegistry::Entry& entry) ABSL_LOCKS_EXCLUDED(mutex_);
  // What may be started now. Whoever calls it passes the result to Do.
  Todo Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Todo todo) ABSL_LOCKS_EXCLUDED(mutex_);
  // Work that was begun without the lock is done.
  void Unbusy() ABSL_LOCKS_EXCLUDED(mutex_);

  // --- header
  void TakeHeader() ABSL_LOCKS_EXCLUDED(mutex_);
  void LookUpResidual(ResidualHeader header) ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeRequest(std::variant<HeaderRequest, grpc::Status> header) ABSL_LOCKS_EXCLUDED(mutex_);
  void Announce(HeaderRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time Deadline(absl::Time now) const;

  // --- tensors
  void TakeChunk() ABSL_LOCKS_EXCLUDED(mutex_);
  void OpenDataPlane(TransferSpec spec) ABSL_LOCKS_EXCLUDED(mutex_);
  void HandOutTickets(const TransferSpec& spec, v1::Accepted accepted) ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<DataPlane> MakePlane(TransferSpec spec);
  void CountInputs(const DataPlane& plane);
  void DrainDeferred() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LookAtTransfer(absl::Time now, const Coordinator& core)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendProgress(absl::Time now, const Coordinator& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(grpc::ByteBuffer message, int64_t payload_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // --- endings
  // No more comes from the client: it half-closed, or went away and OnCancel follows soon.
  void HalfClosed(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // It did not follow: is anything missing?
  void JudgeHalfClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the call for a reason that the core does not know yet, if it knows the call.
  void Leave(Failure why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the core that the request is over and stops all traffic; the core answers
  // with Fail(), or with Succeed() if that crossed on the way.
  void GiveUp(Failure why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const Failure& failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutOffIfStuck(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The call's line in the audit log, once everything is known of it.
  void Audit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const char* Method() const;
  std::string RequestId() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RequestContext* const context_;
  grpc::CallbackServerContext* const call_;
  const Direction direction_;
  const Caller caller_;
  const std::string traceparent_;  // empty: none
  const absl::Time opened_at_;
  std::shared_ptr<RequestCall> self_;  // until OnDone
  // Of the one read that is outstanding, then of whoever handles its message.
  grpc::ByteBuffer incoming_;
  int64_t counted_bytes_ = 0;  // in the metrics, of what has been received; likewise
  // Of the one write that is outstanding: set before StartWrite, read in OnWriteDone.
  Outgoing in_flight_;

  absl::Mutex mutex_;
  CallLife life_ ABSL_GUARDED_BY(mutex_);
  StreamId id_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: it got no place

  // The client's stream.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // outstanding, or its message is being handled
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time judge_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // JudgeHalfClose
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);                 // behind in_flight_
  // Work that goes on without the lock and needs the call: gRPC gets the status after it.
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;

  // From the header on. Inline tensors go to the data plane.
  std::optional<HeaderRequest> request_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_progress_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();

  // From Accept on.
  double flops_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::Transport transport_ ABSL_GUARDED_BY(mutex_) = v1::TRANSPORT_UNSPECIFIED;
  std::string transport_reason_ ABSL_GUARDED_BY(mutex_);
  // From kTransferring on, until kDone.
  std::shared_ptr<DataPlane> plane_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> deferred_ ABSL_GUARDED_BY(mutex_);  // not begun yet
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;              // the plane is to be stopped
  absl::Time looked_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  UploadMeter meter_ ABSL_GUARDED_BY(mutex_);
  int64_t metered_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<BeginDownload> download_ ABSL_GUARDED_BY(mutex_);  // set: downloading
  absl::Duration download_time_ ABSL_GUARDED_BY(mutex_);           // once it succeeded
  // The handle of what it left, until the summary that says it has been written.
  std::string undelivered_residual_ ABSL_GUARDED_BY(mutex_);

  Failure why_ ABSL_GUARDED_BY(mutex_);          // from kGivingUp on
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);  // from kEnding on, and then final
  absl::Time ended_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_REQUEST_CALL_H_
