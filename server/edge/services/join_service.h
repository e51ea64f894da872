// JoinService: the control listener's WorkerControlService, with one JoinStream per worker from its
// registration to its end.
#ifndef RINGATTN_SERVER_EDGE_SERVICES_JOIN_SERVICE_H_
#define RINGATTN_SERVER_EDGE_SERVICES_JOIN_SERVICE_H_

#include <deque>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringattn/v1/worker_control.grpc.pb.h"
#include "server/edge/loop/core_loop.h"

namespace ringattn::server {

class JoinStream;

// Thread safe. Lock order: service, stream, core queue.
class JoinService final : public v1::WorkerControlService::CallbackService {
 public:
  // `core` must outlive the server's calls.
  JoinService(CoreLoop* core, std::string secret);
  ~JoinService() override;

  grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse>* Join(
      grpc::CallbackServerContext* call) override;

  // The core's actions, called within ActionSink::CarryOut(); a closed connection is ignored. The
  // message is written after the core's events, together with those that follow it.
  void Send(ConnectionId connection, v1::JoinResponse message);
  void Drop(ConnectionId connection, const std::string& reason);

  // Ends all streams, and rejects new ones, with the status of a coordinator that shuts down.
  void Close();

 private:
  friend class JoinStream;

  std::shared_ptr<JoinStream> Find(ConnectionId connection);
  void Remove(ConnectionId connection);

  CoreLoop* const core_;
  const std::string secret_;

  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  ConnectionId last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<ConnectionId, std::shared_ptr<JoinStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVICES_JOIN_SERVICE_H_
