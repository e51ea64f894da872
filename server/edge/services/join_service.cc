#include "server/edge/services/join_service.h"

#include <utility>

#include "common/base/monotonic_time.h"
#include "common/observability/log.h"
#include "common/security/secret.h"
#include "common/wire/join_status.h"
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

// Thread safe.
class JoinStream final : public grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse> {
 public:
  JoinStream(JoinService* service, ConnectionId id) : service_(service), id_(id) {
    StartRead(&incoming_);
  }

  void Send(v1::JoinResponse message) {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    if (outgoing_.size() >= kMaxQueuedMessages) {
      return EndLocked(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                    "the worker does not read its control stream"));
    }
    outgoing_.push_back(std::move(message));
    WriteNext();
  }

  // Ends the stream after the queued messages.
  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    EndLocked(status);
  }

  // The next message is read once the core has handled this one, so that a worker cannot fill the
  // core's queue.
  void OnReadDone(bool ok) override {
    if (!ok) {
      Gone();
      return End(grpc::Status::OK);
    }
    auto read_next = [service = service_, id = id_] {
      if (std::shared_ptr<JoinStream> stream = service->Find(id)) stream->ReadNext();
    };
    if (std::exchange(registered_, true)) {
      service_->core_->PostAndHandle(WorkerMessage{id_, std::move(incoming_), MonotonicNow()},
                                     std::move(read_next));
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
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (!ok) outgoing_.clear();
    WriteNext();
  }

  void OnCancel() override {
    Gone();
    absl::MutexLock lock(&mutex_);
    outgoing_.resize(writing_ ? 1 : 0);
    EndLocked(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    Gone();
    service_->Remove(id_);  // usually the last reference
  }

 private:
  void ReadNext() {
    absl::MutexLock lock(&mutex_);
    if (!finished_) StartRead(&incoming_);
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
    if (std::exchange(ending_, true)) return;
    status_ = status;
    WriteNext();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!outgoing_.empty()) {
      writing_ = true;
      StartWrite(&outgoing_.front());
    } else if (ending_) {
      finished_ = true;
      Finish(status_);
    }
  }

  JoinService* const service_;
  const ConnectionId id_;
  v1::JoinRequest incoming_;  // one read at a time
  bool registered_ = false;   // used by the reading thread only

  absl::Mutex mutex_;
  std::string worker_ ABSL_GUARDED_BY(mutex_);                     // empty: not registered
  std::deque<v1::JoinResponse> outgoing_ ABSL_GUARDED_BY(mutex_);  // the first is being written
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
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
  if (std::shared_ptr<JoinStream> stream = Find(connection)) stream->Send(std::move(message));
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
