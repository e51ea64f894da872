#include "server/edge/services/join_service.h"

#include <utility>
#include <vector>

#include "common/base/monotonic_time.h"
#include "common/observability/log.h"
#include "common/security/secret.h"
#include "common/wire/join_status.h"
#include "common/wire/packed_messages.h"
#include "server/core/ring/registration_rules.h"

namespace ringattn::server {
namespace {

// The core sends a handful of messages per operation and worker; a worker with this many unread
// messages has stopped reading.
constexpr size_t kMaxQueuedMessages = 4096;

// Returns the text for the log. The core has not checked its length yet.
std::string Shown(const std::string& text) { return text.substr(0, kMaxWorkerTextBytes); }

grpc::Status ShuttingDown() { return {grpc::StatusCode::UNAVAILABLE, kCoordinatorEnds}; }

}  // namespace

// Thread safe. gRPC's operations start without the lock, so that the core, which enqueues messages,
// does not wait for them.
class JoinStream final : public grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse> {
 public:
  JoinStream(JoinService* service, ConnectionId id) : service_(service), id_(id) {
    StartRead(&incoming_);
  }

  void Send(v1::JoinResponse message) {
    if (Enqueue(std::move(message))) GoOn();
  }

  // Returns whether the caller must call GoOn(), soon.
  bool Enqueue(v1::JoinResponse message) {
    absl::MutexLock lock(&mutex_);
    if (ending_) return false;
    if (outgoing_.size() >= kMaxQueuedMessages) {
      EndLocked(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                             "the worker does not read its control stream"));
    } else {
      outgoing_.push_back(std::move(message));
    }
    return !writing_;
  }

  // Starts the next write, or ends the stream, if it may.
  void GoOn() {
    bool writes = false;
    {
      absl::MutexLock lock(&mutex_);
      if (writing_ || finished_) return;
      if (!outgoing_.empty()) {
        writes = writing_ = true;
        in_flight_ = wire::TakePacked(outgoing_);
      } else if (ending_ && !starting_read_) {
        finished_ = true;
      } else {
        return;
      }
    }
    writes ? StartWrite(&in_flight_) : Finish(FinalStatus());
  }

  // Ends the stream after the queued messages.
  void End(const grpc::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      EndLocked(status);
    }
    GoOn();
  }

  // The next message is read once the core has handled all that came with this one, so that a
  // worker cannot fill the core's queue.
  void OnReadDone(bool ok) override {
    if (!ok) {
      Gone();
      return End(grpc::Status::OK);
    }
    auto read_next = [service = service_, id = id_] {
      if (std::shared_ptr<JoinStream> stream = service->Find(id)) stream->ReadNext();
    };
    if (std::exchange(registered_, true)) {
      const absl::Time now = MonotonicNow();
      std::vector<Event> events;
      wire::TakeApart(std::move(incoming_), [&](v1::JoinRequest message, bool) {
        events.push_back(WorkerMessage{id_, std::move(message), now});
      });
      service_->core_->PostAndHandle(std::move(events), std::move(read_next));
    } else if (incoming_.has_register_()) {
      const v1::Register& registration = incoming_.register_();
      LogInfo("worker joins", {{"worker", Shown(registration.name())},
                               {"incarnation", Shown(registration.incarnation())},
                               {"device", Shown(registration.device())},
                               {"data_address", Shown(registration.data_address())},
                               {"client_data_address", Shown(registration.client_data_address())},
                               {"connection", id_}});
      absl::MutexLock lock(&mutex_);
      // The core already knows of the stream's end; a later registration would never be removed.
      if (removed_) return;
      worker_ = Shown(registration.name());
      service_->core_->Post(WorkerJoined{id_, registration}, std::move(read_next));
    } else {
      End(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                       "the first message must be the registration"));
    }
  }

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (!ok) outgoing_.clear();
    }
    GoOn();
  }

  void OnCancel() override {
    Gone();
    {
      absl::MutexLock lock(&mutex_);
      outgoing_.clear();
    }
    End(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    Gone();
    service_->Remove(id_);  // usually the last reference
  }

 private:
  // Finish() must not overtake StartRead().
  void ReadNext() {
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      starting_read_ = true;
    }
    StartRead(&incoming_);
    {
      absl::MutexLock lock(&mutex_);
      starting_read_ = false;
    }
    GoOn();
  }

  void Gone() {
    std::string worker;
    {
      absl::MutexLock lock(&mutex_);
      if (std::exchange(removed_, true)) return;
      worker = worker_;
    }
    if (!worker.empty()) LogInfo("worker left", {{"worker", worker}, {"connection", id_}});
    service_->core_->Post(WorkerDisconnected{id_});
  }

  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!std::exchange(ending_, true)) status_ = status;
  }

  grpc::Status FinalStatus() {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

  JoinService* const service_;
  const ConnectionId id_;
  v1::JoinRequest incoming_;    // one read at a time
  v1::JoinResponse in_flight_;  // while it is being written
  bool registered_ = false;     // used by the reading thread only

  absl::Mutex mutex_;
  std::string worker_ ABSL_GUARDED_BY(mutex_);                     // empty: not registered
  std::deque<v1::JoinResponse> outgoing_ ABSL_GUARDED_BY(mutex_);  // not written yet
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool starting_read_ ABSL_GUARDED_BY(mutex_) = false;
  bool removed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

JoinService::JoinService(CoreLoop* core, std::string secret)
    : core_(core), secret_(std::move(secret)) {}

JoinService::~JoinService() = default;

grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse>* JoinService::Join(
    grpc::CallbackServerContext* call) {
  class Refusal final : public grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse> {
   public:
    explicit Refusal(const grpc::Status& status) { Finish(status); }
    void OnDone() override { delete this; }
  };
  if (grpc::Status status = CheckSecret(*call, secret_); !status.ok()) return new Refusal(status);
  absl::MutexLock lock(&mutex_);
  if (closed_) return new Refusal(ShuttingDown());
  const ConnectionId id = ++last_;
  return streams_.emplace(id, std::make_shared<JoinStream>(this, id)).first->second.get();
}

void JoinService::Send(ConnectionId connection, v1::JoinResponse message) {
  std::shared_ptr<JoinStream> stream = Find(connection);
  if (stream == nullptr || !stream->Enqueue(std::move(message))) return;
  core_->AfterEvents([stream = std::move(stream)] { stream->GoOn(); });
}

void JoinService::Drop(ConnectionId connection, const std::string& reason) {
  LogWarning("worker dropped", {{"connection", connection}, {"reason", reason}});
  if (std::shared_ptr<JoinStream> stream = Find(connection)) {
    stream->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, reason));
  }
}

void JoinService::Close() {
  std::map<ConnectionId, std::shared_ptr<JoinStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    streams = streams_;
  }
  v1::JoinResponse leave;
  leave.mutable_leave()->set_reason(kCoordinatorEnds);
  for (const auto& [id, stream] : streams) {
    stream->Send(leave);
    stream->End(ShuttingDown());
  }
}

std::shared_ptr<JoinStream> JoinService::Find(ConnectionId connection) {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(connection);
  return found == streams_.end() ? nullptr : found->second;
}

void JoinService::Remove(ConnectionId connection) {
  std::shared_ptr<JoinStream> removed;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(connection);
  if (found == streams_.end()) return;
  removed = std::move(found->second);
  streams_.erase(found);
}

}  // namespace ringattn::server
