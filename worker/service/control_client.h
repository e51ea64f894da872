// ControlClient: the Join stream to the coordinator. Connects, registers, reads and writes. When
// the stream ends, it frees everything and reconnects, until it is stopped.
#ifndef RINGATTN_WORKER_SERVICE_CONTROL_CLIENT_H_
#define RINGATTN_WORKER_SERVICE_CONTROL_CLIENT_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "common/security/credentials.h"
#include "ringattn/v1/worker_control.grpc.pb.h"

namespace ringattn::worker {

struct ControlClientOptions {
  std::string coordinator;  // host:port of its control listener
  std::string secret;
  TransportSecurity security;
  v1::Register registration;
  absl::Duration min_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(2);
  // The pause after another process registered this worker's name. Each of the two replaces the
  // other, and each replacement ends the ring.
  absl::Duration replaced_backoff = absl::Seconds(10);
};

struct ControlHandler {
  // Called for every message except `registered` and `leave`, on the control thread. Must not
  // block.
  std::function<void(v1::JoinResponse)> on_message;
  // The stream has ended. Returns once everything is free.
  std::function<void(const std::string& reason)> on_disconnected;
  // Called at each interval by the heartbeat thread. Must return quickly and not wait for work.
  std::function<v1::Heartbeat()> make_heartbeat;
  // The coordinator asks this process to exit. Must not block.
  std::function<void(const std::string& reason)> on_leave;
  // Completes the registration of the next stream, and: the coordinator has accepted it. Both must
  // not block.
  std::function<void(v1::Register*)> complete_registration = [](v1::Register*) {};
  std::function<void()> on_registered = [] {};
};

// Thread safe.
class ControlClient {
 public:
  explicit ControlClient(ControlClientOptions options);
  // Ends the stream and joins all threads.
  ~ControlClient();

  ControlClient(const ControlClient&) = delete;
  ControlClient& operator=(const ControlClient&) = delete;

  // Starts connecting. Call once.
  void Start(ControlHandler handler);

  // Tells the coordinator that this worker wants to leave. Waits until the coordinator releases it,
  // its stream ends for another reason, or `timeout` passes. Does not reconnect. Call Stop()
  // afterwards. Blocks.
  void Leave(absl::Duration timeout);

  // Ends the stream and frees everything before it returns. Idempotent.
  void Stop();

  // Enqueues a message for the current stream, or drops it if there is none. Blocks only for the
  // answer of an inline operation, which it writes itself if no other write is in progress: waking
  // the writer takes longer. Answers to messages that arrived together wait for one another, for
  // kHoldTime at most.
  void Send(v1::JoinRequest message);

 private:
  using Stream = grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>;

  void Loop();
  struct SessionEnd {
    std::string reason;
    bool registered = false;         // the coordinator accepted the worker
    bool replaced = false;           // by another stream of the same name
    bool coordinator_ended = false;  // it has shut down
  };
  // Runs one stream from connecting to its end.
  SessionEnd RunSession();
  void ReadLoop(Stream* stream, SessionEnd* end);
  // Returns false if the session ends.
  bool Take(v1::JoinResponse message, SessionEnd* end);
  // Messages wait in outbox_ from Hold() to EndHold(), which writes them.
  void Hold() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndHold() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the stream to write `message` to, which the caller does with FinishWrite(); null if
  // another thread writes what waits. The writer's thread is not woken in between.
  Stream* BeginWrite(v1::JoinRequest* message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWrite(Stream* stream, const v1::JoinRequest& message) ABSL_LOCKS_EXCLUDED(mutex_);
  void WriteLoop(Stream* stream);
  void HeartbeatLoop();
  // Waits for the next message to write and sets writing_. Returns false at the stream's end.
  bool TakeNext(v1::JoinRequest* message) ABSL_LOCKS_EXCLUDED(mutex_);
  bool is_held() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return held_until_ > absl::InfinitePast();
  }
  bool IsLeaving();
  // Returns false if Stop or Leave was called.
  bool RestBeforeDialling(absl::Duration duration);

  const ControlClientOptions options_;
  ControlHandler handler_;
  std::unique_ptr<v1::WorkerControlService::Stub> stub_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;  // no stream is open and none will be opened
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Stream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;  // while messages may be written
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;      // a thread writes to stream_
  // Messages wait in outbox_ until then, because more are coming. InfinitePast: they do not wait.
  absl::Time held_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::deque<v1::JoinRequest> outbox_ ABSL_GUARDED_BY(mutex_);
  // Only the latest: heartbeats must not pile up on a stream that does not drain.
  std::optional<v1::JoinRequest> heartbeat_ ABSL_GUARDED_BY(mutex_);
  absl::Duration heartbeat_interval_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();

  Wakeup end_rest_;        // by Stop and Leave
  Wakeup end_heartbeats_;  // by Stop

  std::thread loop_;
  std::thread heartbeats_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_CONTROL_CLIENT_H_
