// FakeCoordinator: the coordinator's side of the Join streams, which a test controls step by step.
#ifndef RINGATTN_WORKER_TESTING_FAKE_COORDINATOR_H_
#define RINGATTN_WORKER_TESTING_FAKE_COORDINATOR_H_

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringattn/v1/worker_control.grpc.pb.h"

namespace ringattn::worker {

// Thread safe.
class FakeCoordinator : public v1::WorkerControlService::Service {
 public:
  // `port`: 0 picks a free one.
  explicit FakeCoordinator(std::string secret, int port = 0);
  ~FakeCoordinator() override;

  std::string address() const;
  int port() const { return port_; }

  // Waits for a worker to register.
  std::optional<v1::Register> WaitForWorker(const std::string& name, absl::Duration timeout);

  void Send(const std::string& worker, const v1::JoinResponse& message);

  // Returns the oldest message of that kind from the worker, and drops all messages before it. Does
  // not apply to heartbeats. Returns nothing after the timeout.
  std::optional<v1::JoinRequest> Await(const std::string& worker, v1::JoinRequest::MessageCase kind,
                                       absl::Duration timeout = absl::Seconds(10));
  v1::Heartbeat LastHeartbeat(const std::string& worker);

  // Ends every stream, as if the coordinator had died.
  void Vanish();

  grpc::Status Join(grpc::ServerContext* context,
                    grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>* stream) override;

 private:
  using Stream = grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>;
  struct Peer {
    Stream* stream = nullptr;
    v1::Register registration;
    std::deque<v1::JoinRequest> messages;
    v1::Heartbeat heartbeat;
  };

  const std::string secret_;
  int port_ = 0;
  absl::Mutex mutex_;
  std::map<std::string, Peer> peers_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_FAKE_COORDINATOR_H_
