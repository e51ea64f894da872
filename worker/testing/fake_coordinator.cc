#include "worker/testing/fake_coordinator.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/security/credentials.h"
#include "common/security/secret.h"
#include "common/wire/durations.h"
#include "common/wire/packed_messages.h"

namespace ringattn::worker {

FakeCoordinator::FakeCoordinator(std::string secret, int port) : secret_(std::move(secret)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port),
                           TransportSecurity().ServerCredentials(), &port_);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

FakeCoordinator::~FakeCoordinator() { Vanish(); }

std::string FakeCoordinator::address() const { return absl::StrCat("127.0.0.1:", port_); }

std::optional<v1::Register> FakeCoordinator::WaitForWorker(const std::string& name,
                                                           absl::Duration timeout) {
  const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return peers_.count(name) > 0 && peers_[name].stream != nullptr;
  };
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(&there), timeout)) return std::nullopt;
  return peers_[name].registration;
}

void FakeCoordinator::Send(const std::string& worker, const v1::JoinResponse& message) {
  absl::MutexLock lock(&mutex_);
  const auto peer = peers_.find(worker);
  if (peer != peers_.end() && peer->second.stream != nullptr) peer->second.stream->Write(message);
}

std::optional<v1::JoinRequest> FakeCoordinator::Await(const std::string& worker,
                                                      v1::JoinRequest::MessageCase kind,
                                                      absl::Duration timeout) {
  std::optional<v1::JoinRequest> found;
  const auto arrived = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::deque<v1::JoinRequest>& messages = peers_[worker].messages;
    while (!messages.empty() && !found.has_value()) {
      if (messages.front().message_case() == kind) found = messages.front();
      messages.pop_front();
    }
    return found.has_value();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&arrived), timeout);
  return found;
}

v1::Heartbeat FakeCoordinator::LastHeartbeat(const std::string& worker) {
  absl::MutexLock lock(&mutex_);
  return peers_[worker].heartbeat;
}

void FakeCoordinator::Vanish() { server_->Shutdown(std::chrono::system_clock::now()); }

grpc::Status FakeCoordinator::Join(grpc::ServerContext* context, Stream* stream) {
  const auto secret = context->client_metadata().find(kSecretMetadataKey);
  if (secret == context->client_metadata().end() || secret->second != secret_) {
    return {grpc::StatusCode::UNAUTHENTICATED, "wrong secret"};
  }
  v1::JoinRequest message;
  if (!stream->Read(&message) || !message.has_register_()) {
    return {grpc::StatusCode::INVALID_ARGUMENT, "register first"};
  }
  const std::string name = message.register_().name();
  v1::JoinResponse registered;
  SetSeconds(0.05, registered.mutable_registered()->mutable_heartbeat_interval());
  {
    absl::MutexLock lock(&mutex_);
    peers_[name] = Peer{stream, message.register_()};
    stream->Write(registered);
  }
  while (stream->Read(&message)) {
    absl::MutexLock lock(&mutex_);
    wire::TakeApart(message, [&](v1::JoinRequest each, bool) {
      if (each.has_heartbeat()) {
        peers_[name].heartbeat = each.heartbeat();
      } else {
        peers_[name].messages.push_back(std::move(each));
      }
    });
  }
  absl::MutexLock lock(&mutex_);
  if (peers_[name].stream == stream) peers_[name].stream = nullptr;
  return grpc::Status::OK;
}

}  // namespace ringattn::worker
