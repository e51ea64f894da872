// ResidualHold: keeps residuals alive at the workers by the HoldResiduals stream. If this process
// dies, they expire within the server's grace. A broken connection is reopened before that.
// Tests: residual_hold_test.cc.
#ifndef RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_
#define RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/security/bearer_token.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// Thread safe.
class ResidualHold {
 public:
  struct Options {
    // A third of the server's grace (Limits.residual_hold_grace), so that a broken connection is
    // noticed and replaced within the grace.
    absl::Duration sign_of_life = absl::Seconds(3);
    absl::Duration min_backoff = absl::Milliseconds(100);
    absl::Duration max_backoff = absl::Seconds(2);
  };

  // `token` may be null. Sends nothing before the first Hold.
  ResidualHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
               const Options& options);
  ResidualHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token)
      : ResidualHold(std::move(channel), std::move(token), Options()) {}
  // Ends the stream. The residuals last for the server's grace.
  ~ResidualHold();

  ResidualHold(const ResidualHold&) = delete;
  ResidualHold& operator=(const ResidualHold&) = delete;

  // These do not block. A residual that was read, lost or deleted need not be released, but its
  // handle is remembered until then.
  void Hold(const std::vector<std::string>& handles) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(const std::vector<std::string>& handles) ABSL_LOCKS_EXCLUDED(mutex_);

  // The number of held residuals that the server has confirmed and not reported as gone.
  size_t confirmed() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Why nothing is held at the moment; OK while holds are in effect or none was requested. Without
  // a hold, residuals expire by their own ttl. UNIMPLEMENTED, from a server without holds, is
  // final.
  absl::Status trouble() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs one stream until it ends or this object is destroyed.
  absl::Status Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for a request to send, or until a sign of life is due. Returns false on destruction.
  bool NextRequest(v1::HoldResidualsRequest* request) ABSL_LOCKS_EXCLUDED(mutex_);
  void Take(const v1::HoldResidualsRequest& request, const v1::HoldResidualsResponse& response)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::shared_ptr<BearerToken> token_;
  const Options options_;
  mutable absl::Mutex mutex_;
  std::set<std::string> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> confirmed_ ABSL_GUARDED_BY(mutex_);  // on this stream; a subset of held_
  std::set<std::string> unsaid_ ABSL_GUARDED_BY(mutex_);     // on this stream; a subset of held_
  std::set<std::string> released_ ABSL_GUARDED_BY(mutex_);   // not sent either
  absl::Status trouble_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the open stream
  std::thread thread_;  // from the first Hold on; joined by the destructor
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_
