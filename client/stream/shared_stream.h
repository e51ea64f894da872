// SharedStream: one stream of AttentionService.Calls, and the calls on it.
#ifndef RINGATTN_CLIENT_STREAM_SHARED_STREAM_H_
#define RINGATTN_CLIENT_STREAM_SHARED_STREAM_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/alarm.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/stream/call_sharer.h"
#include "client/stream/call_stream.h"
#include "common/wire/calls_frame.h"
#include "common/wire/message_buffer.h"

namespace ringattn::client {

// Thread safe. Users are called back without locks, each by one thread at a time. Keeps itself
// alive from Open until gRPC has released it.
class SharedStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                           public std::enable_shared_from_this<SharedStream> {
 public:
  // `token`: the caller's; empty: none.
  SharedStream(CallSharer* sharer, const std::string& token);
  ~SharedStream() override;

  void Open();
  // Returns null if the stream begins no further call, or has `max_calls`.
  std::unique_ptr<CallStream> Add(const CallStreamOptions& options, CallStream::User* user,
                                  uint32_t max_calls) ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsOver() ABSL_LOCKS_EXCLUDED(mutex_);
  // Begins no further call, and half-closes once all calls have ended.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the stream at once.
  void Abandon() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Call;
  class Handle;
  struct Outgoing {
    wire::MessageBuffer message;
    std::shared_ptr<Call> call;  // whose first message it is; null: a cancellation
  };

  // grpc::ClientBidiReactor
  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWritesDoneDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone(const grpc::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_);

  void Begin(std::shared_ptr<Call> call) ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel(std::shared_ptr<Call> call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the answers of the message that was read. Calls that their users begin meanwhile leave in
  // one message afterwards.
  void TakeMessage() ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeResponse(wire::CallResponseFrame frame) ABSL_LOCKS_EXCLUDED(mutex_);
  // The call receives nothing more, if it has not ended already.
  void EndCall(std::shared_ptr<Call> call, const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls the user back as often as there is reason to.
  void Pump(std::shared_ptr<Call> call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts the write that may start, or half-closes.
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);
  void SetTimer() ABSL_LOCKS_EXCLUDED(mutex_);
  void OnTimer(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns whether the caller must call RemoveHold().
  bool TakeHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closing_ || ended_; }

  CallSharer* const sharer_;
  const CallSharer::Options options_;
  std::optional<grpc::GenericStub> stub_;
  std::optional<grpc::ClientContext> context_;
  std::shared_ptr<SharedStream> self_;  // until OnDone
  grpc::ByteBuffer incoming_;           // of the outstanding read
  wire::MessageBuffer in_flight_;       // of the outstanding write
  bool has_answered_ = false;           // written in OnReadDone, read in OnDone

  absl::Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);
  uint32_t open_ ABSL_GUARDED_BY(mutex_) = 0;  // those, and those that have not begun
  uint64_t last_call_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  // Those whose first messages are being written.
  std::vector<std::shared_ptr<Call>> writing_calls_ ABSL_GUARDED_BY(mutex_);
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;   // a thread is in TakeMessage()
  bool has_hold_ ABSL_GUARDED_BY(mutex_) = true;  // gRPC may not end the RPC yet
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;      // threads that start a write
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool writes_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;                  // the server sends nothing more
  std::optional<grpc::Status> broken_ ABSL_GUARDED_BY(mutex_);  // the end, if the client ends it
  absl::Time used_at_ ABSL_GUARDED_BY(mutex_);                  // monotonic
  std::optional<grpc::Alarm> timer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_STREAM_SHARED_STREAM_H_
