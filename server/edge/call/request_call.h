// RequestCall: one client's Forward or Backward call, from the header to the status. It checks the
// header, submits the request to the core, opens a data plane when the core accepts, and ends as
// the core decides. The data plane moves the tensors. request_call_writers.cc has the calls of
// requests with several clients.
//
// Tests: slow_clients_test.cc, undelivered_residual_test.cc
#ifndef RINGATTN_SERVER_EDGE_CALL_REQUEST_CALL_H_
#define RINGATTN_SERVER_EDGE_CALL_REQUEST_CALL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/wire/message_buffer.h"
#include "server/core/events/events.h"
#include "server/edge/call/call_header.h"
#include "server/edge/call/call_state.h"
#include "server/edge/call/client_stream.h"
#include "server/edge/call/request_context.h"
#include "server/edge/call/upload_meter.h"
#include "server/edge/call/writer_groups.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/data/inline_plane.h"
#include "server/edge/header/header_translation.h"

namespace ringattn::server {

// Thread safe: called by gRPC's threads and by the core's thread. The lock guards the call's state
// and is held only briefly. Header checks, payload and gRPC operations run without it, so the
// core's thread never waits for them. Lock order: data plane, call, core queue. DataPlane::Look,
// HasRoom, complete and totals may be called under the call's lock.
class RequestCall final : public ClientStream::User,
                          public TransferListener,
                          public std::enable_shared_from_this<RequestCall> {
 public:
  // Serves a call on a separate RPC. Returns a reactor that deletes itself when gRPC has released
  // the call.
  static ByteStreamReactor* Start(const RequestContext* context, grpc::CallbackServerContext* call,
                                  Direction direction);
  // Serves a call on `stream`, which must live until OnDone. Reads its first message at once.
  static void Serve(const RequestContext* context, ClientStream* stream, Direction direction,
                    Caller caller, CallOrigin origin);

  // Called from the core's thread. Accept, Download and Succeed of an inline operation are called
  // after the core's events instead (CoreLoop::AfterEvents).
  void Accept(const AcceptRequest& accept) ABSL_LOCKS_EXCLUDED(mutex_);
  void Download(BeginDownload begin) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance(const TransferAdvanced& advanced) ABSL_LOCKS_EXCLUDED(mutex_);
  void Succeed(const FinishRequest& finish) ABSL_LOCKS_EXCLUDED(mutex_);
  void Fail(const Failure& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnTick(absl::Time now, const Coordinator& core) ABSL_LOCKS_EXCLUDED(mutex_);

  // --- A request of several clients (writer_groups.h). The lead is the call of writer 0. Any
  // thread, without locks.
  // All writers have joined: submits the request, with the transports of all of them.
  void StartAsLead(TransportChoice joined, std::vector<std::shared_ptr<RequestCall>> followers)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on the lead passes on what the core decides. Returns false if this call has ended.
  bool Follow(std::shared_ptr<RequestCall> lead) ABSL_LOCKS_EXCLUDED(mutex_);
  // The group has failed.
  void FailWriter(const Failure& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  void FailWriter(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends this call, and with it its group, because another call takes its place.
  void LeaveWriters(const Failure& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns the tensor bytes transferred so far. Any thread.
  TransferTotals Totals() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the call to free its slot, unless its header has arrived. Any thread.
  void Evict() ABSL_LOCKS_EXCLUDED(mutex_);

  // ClientStream::User
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
    wire::MessageBuffer message;
    int64_t payload_bytes = 0;
  };
  // Reading from the client's stream.
  enum class ReadPhase {
    kIdle,        // no read is outstanding
    kReading,     // a read is outstanding, or its message is being handled
    kHalfClosed,  // the client sends nothing more
  };
  // Work decided under the lock and executed without it.
  struct Steps {
    std::shared_ptr<DataPlane> stop = nullptr;
    std::function<void()> deferred = nullptr;  // runs on one of gRPC's threads
    bool read = false;
    bool write = false;         // with `finish`: the last message, together with the status
    bool more_follows = false;  // gRPC need not flush this message
    std::optional<grpc::Status> finish = std::nullopt;
  };

  RequestCall(const RequestContext* context, ClientStream* stream, Direction direction,
              Caller caller, CallOrigin origin);

  void Begin(const RequestRegistry::Entry& entry) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the work that may start now. The caller passes it to Do.
  Steps Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Steps steps) ABSL_LOCKS_EXCLUDED(mutex_);
  // Marks the end of work that ran without the lock.
  void Unbusy() ABSL_LOCKS_EXCLUDED(mutex_);

  // --- header
  void TakeHeader() ABSL_LOCKS_EXCLUDED(mutex_);
  void LookUpResidual(ResidualHeader header) ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeRequest(std::variant<HeaderRequest, grpc::Status> header) ABSL_LOCKS_EXCLUDED(mutex_);
  // Submits request_ to the core.
  void Announce(TransportChoice transport) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time Deadline(absl::Time now) const;

  // --- writers
  // Waits for the other writers. Returns what WriterGroups::Join needs.
  WriterHeader Gather() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A follower has left.
  void LoseWriter(int index, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports the end of a waiting call to its group.
  void LeaveGroup(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the followers, because this call has ended.
  void EndFollowers(const grpc::Status& status, bool left_itself)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::shared_ptr<RequestCall>> Followers() ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the request has `prepare`. REQUIRES: its header is checked.
  bool only_prepares() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return request_->valid.prepare_ttl.has_value();
  }
  bool follows() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return lead_ != nullptr; }
  WriterKey GroupKey() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int writer_index() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool waits_for_writers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return life_.state() == CallState::kGathering;
  }

  // A decision of the core, for this call without its followers.
  void AcceptOwn(const AcceptRequest& accept) ABSL_LOCKS_EXCLUDED(mutex_);
  void DownloadOwn(BeginDownload begin) ABSL_LOCKS_EXCLUDED(mutex_);
  void AdvanceOwn(const TransferAdvanced& advanced) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if the call had given up.
  bool SucceedOwn(const FinishRequest& finish) ABSL_LOCKS_EXCLUDED(mutex_);
  void CountSuccess(const FinishRequest& finish) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // --- tensors
  void TakeChunk() ABSL_LOCKS_EXCLUDED(mutex_);
  void OpenDataPlane(TransferSpec spec) ABSL_LOCKS_EXCLUDED(mutex_);
  // Accept of an inline operation. Its messages are written together with the status.
  void OpenInline(const Plan& plan, v1::Accepted accepted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnqueueOutputs() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Replaces the queued messages of an inline operation by one SingleReply.
  void JoinMessages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandOutTickets(const TransferSpec& spec, v1::Accepted accepted) ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<DataPlane> MakePlane(TransferSpec spec);
  void CountInputs(const DataPlane& plane);
  void DrainDeferred() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LookAtTransfer(absl::Time now, const Coordinator& core)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendProgress(absl::Time now, const Coordinator& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(wire::MessageBuffer message, int64_t payload_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // --- endings
  // The client sends nothing more: it half-closed, or it disconnected and OnCancel follows.
  void HalfClosed(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // OnCancel did not follow: rejects an incomplete upload.
  void CheckHalfClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the call for a reason that the core, if it knows the call, does not know yet.
  void Leave(Failure why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reports the end to the core and stops all traffic. The core answers with Fail(), or with
  // Succeed() if the request succeeded at the same time.
  void GiveUp(Failure why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const Failure& failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutOffIfStuck(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for a result that was sent together with the status.
  void CancelIfStuck(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes the call's line to the audit log, once the outcome is final.
  void Audit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const char* Method() const;
  std::string RequestId() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RequestContext* const context_;
  ClientStream* const stream_;  // until OnDone
  const Direction direction_;
  const Caller caller_;
  const absl::Time client_deadline_;  // monotonic
  const std::string traceparent_;     // empty: none
  const bool is_one_of_several_;      // CallOrigin
  const absl::Time opened_at_;
  std::shared_ptr<RequestCall> self_;  // until OnDone
  // Owned by the outstanding read, then by the handler of its message.
  grpc::ByteBuffer incoming_;
  int64_t counted_bytes_ = 0;  // bytes of incoming_ already counted in the metrics
  // The outstanding write: set before StartWrite, read in OnWriteDone.
  Outgoing in_flight_;

  absl::Mutex mutex_;
  CallLife life_ ABSL_GUARDED_BY(mutex_);
  StreamId id_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: it got no slot
  // Ticks reach the call before its number does, and must start nothing.
  bool has_begun_ ABSL_GUARDED_BY(mutex_) = false;

  // The client's stream.
  ReadPhase read_phase_ ABSL_GUARDED_BY(mutex_) = ReadPhase::kIdle;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_written_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time half_close_check_at_ ABSL_GUARDED_BY(mutex_) =
      absl::InfiniteFuture();                              // for CheckHalfClose
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);  // queued after in_flight_
  // Amount of work without the lock that needs the call. gRPC receives the status after it.
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;

  // Set once the header is checked. Inline tensors move to the data plane.
  std::optional<HeaderRequest> request_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_progress_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();

  // Set by Accept.
  double flops_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t members_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::Transport transport_ ABSL_GUARDED_BY(mutex_) = v1::TRANSPORT_UNSPECIFIED;
  std::string transport_reason_ ABSL_GUARDED_BY(mutex_);
  // From kTransferring until kDone.
  std::shared_ptr<DataPlane> plane_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<InlinePlane> inline_plane_ ABSL_GUARDED_BY(mutex_);  // null, or plane_
  // All messages together fit into HTTP/2's initial window of 64 KiB, so their writes end without
  // the client's help.
  bool is_small_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_single_ ABSL_GUARDED_BY(mutex_) = false;  // small, and the client takes a SingleReply
  std::function<void()> deferred_ ABSL_GUARDED_BY(mutex_);  // not started yet
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;              // the data plane must be stopped
  absl::Time looked_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  UploadMeter meter_ ABSL_GUARDED_BY(mutex_);
  int64_t metered_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<BeginDownload> download_ ABSL_GUARDED_BY(mutex_);  // set: downloading
  absl::Duration download_time_ ABSL_GUARDED_BY(mutex_);           // set on success
  // Handle of the residual that the call produced; cleared once the summary was written.
  std::string undelivered_residual_ ABSL_GUARDED_BY(mutex_);

  // Until OnDone. Set for a follower.
  std::shared_ptr<RequestCall> lead_ ABSL_GUARDED_BY(mutex_);
  // Until OnDone. Set for a lead.
  std::vector<std::shared_ptr<RequestCall>> followers_ ABSL_GUARDED_BY(mutex_);
  bool lost_writer_ ABSL_GUARDED_BY(mutex_) = false;  // a lead that gives up for a follower
  // A follower that left before this lead started.
  std::optional<Failure> early_loss_ ABSL_GUARDED_BY(mutex_);

  Failure why_ ABSL_GUARDED_BY(mutex_);          // from kGivingUp on
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);  // final from kEnding on
  absl::Time ended_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool cancelled_unread_ ABSL_GUARDED_BY(mutex_) = false;  // by CancelIfStuck
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_REQUEST_CALL_H_
