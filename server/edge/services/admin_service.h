// AdminServiceImpl: the control listener's AdminService. Drain and ReformRing wait for the core.
#ifndef RINGATTN_SERVER_EDGE_SERVICES_ADMIN_SERVICE_H_
#define RINGATTN_SERVER_EDGE_SERVICES_ADMIN_SERVICE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringattn/v1/admin.grpc.pb.h"
#include "server/edge/loop/core_loop.h"

namespace ringattn::server {

class AdminWaiter;

// Thread safe.
class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  // `core` must outlive the server's calls.
  AdminServiceImpl(CoreLoop* core, std::string secret);
  ~AdminServiceImpl() override;

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* call,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* ReformRing(grpc::CallbackServerContext* call,
                                       const v1::ReformRingRequest* request,
                                       v1::ReformRingResponse* response) override;

  // The core's answers, forwarded to all waiting callers.
  void OnDrained();
  void OnReformed(const RingReformed& reformed);
  // Returns true once drained, or false at the deadline. For shutdown.
  bool DrainAndWait(absl::Duration timeout);
  // Answers all waiting callers with UNAVAILABLE.
  void Close();

 private:
  using Waiters = std::vector<std::shared_ptr<AdminWaiter>>;

  CoreLoop* const core_;
  const std::string secret_;
  absl::Mutex mutex_;
  Waiters drains_ ABSL_GUARDED_BY(mutex_);
  Waiters reforms_ ABSL_GUARDED_BY(mutex_);
  int64_t drained_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVICES_ADMIN_SERVICE_H_
