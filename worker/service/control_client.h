// ControlClient: the Join stream to the coordinator. Dials, registers, reads, writes,
// and when the stream ends frees everything and dials again, for ever.
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
};

struct ControlHandler {
  // Every message but registered and leave, on the control thread; must not block.
  std::function<void(const v1::JoinResponse&)> on_message;
  // The stream has ended; returns when everything is free.
  std::function<void(const std::string& reason)> on_disconnected;
  // Quick, never waits for work. Called every interval by the heartbeat thread.
  std::function<v1::Heartbeat()> make_heartbeat;
  // The coordinator asks this process to end. Must not block.
  std::function<void(const std::string& reason)> on_leave;
};

// Thread safe.
class ControlClient {
 public:
  explicit ControlClient(ControlClientOptions options);
  // Ends the stream and everything behind it.
  ~ControlClient();

  ControlClient(const ControlClient&) = delete;
  ControlClient& operator=(const ControlClient&) = delete;

  // Begins. Call once.
  void Start(ControlHandler handler);

  // Tells the coordinator that this worker is to end and waits until it is let go, its stream
  // has ended for another reason, or `timeout` is over. It does not dial again. Stop() is still
  // to be called. Blocks.
  void Leave(absl::Duration timeout);

  // Ends the stream, frees everything, returns. Idempotent.
  void Stop();

  // Enqueues a message for the current stream; dropped if there is none. Never blocks.
  void Send(v1::JoinRequest message);

 private:
  using Stream = grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>;

  void Loop();
  // One stream, from dialling to its end. True if the coordinator accepted it.
  bool RunSession(std::string* reason);
  void ReadLoop(Stream* stream, bool* registered);
  void WriteLoop(Stream* stream);
  void HeartbeatLoop();
  bool TakeNext(v1::JoinRequest* message);
  bool IsLeaving();
  // False if it is to end meanwhile.
  bool Sleep(absl::Duration duration);
  bool RestBeforeDialling(absl::Duration duration);

  const ControlClientOptions options_;
  ControlHandler handler_;
  std::unique_ptr<v1::WorkerControlService::Stub> stub_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;  // no stream any more, and none to come
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::deque<v1::JoinRequest> outbox_ ABSL_GUARDED_BY(mutex_);
  // At most one: a stream that does not drain must not pile them up.
  std::optional<v1::JoinRequest> heartbeat_ ABSL_GUARDED_BY(mutex_);
  absl::Duration heartbeat_interval_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();

  std::thread loop_;
  std::thread heartbeats_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_CONTROL_CLIENT_H_
