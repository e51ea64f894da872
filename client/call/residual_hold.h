// ResidualHold: keeps residuals with the workers for as long as it lives, by HoldResiduals. When
// this process dies, they go within the server's grace; a connection that breaks is opened anew
// before that.
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
#include "ringattn/v1/attention.grpc.pb.h"

namespace ringattn::client {

// Thread safe.
class ResidualHold {
 public:
  struct Options {
    // A third of the server's grace (Limits.residual_hold_grace): a broken connection is noticed,
    // and the next one open, before it is over.
    absl::Duration sign_of_life = absl::Seconds(3);
    absl::Duration min_backoff = absl::Milliseconds(100);
    absl::Duration max_backoff = absl::Seconds(2);
  };

  // `token` may be null. Nothing is sent before the first Hold.
  ResidualHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
               const Options& options);
  ResidualHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token)
      : ResidualHold(std::move(channel), std::move(token), Options()) {}
  // Ends the stream; what it held lasts for the server's grace.
  ~ResidualHold();

  ResidualHold(const ResidualHold&) = delete;
  ResidualHold& operator=(const ResidualHold&) = delete;

  // Neither blocks. What is read, lost or deleted need not be released, but this remembers its
  // handle until then.
  void Hold(const std::vector<std::string>& handles) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(const std::vector<std::string>& handles) ABSL_LOCKS_EXCLUDED(mutex_);

  // Of Hold that the server has confirmed, and has not found to be gone.
  size_t confirmed() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Why nothing is held at the moment; empty while it is, or nothing was asked for. Residuals then
  // last for the time that they have. UNIMPLEMENTED, of an older server, is for good.
  absl::Status trouble() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // One stream, until it ends or this does.
  absl::Status Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for something to say, or a sign of life to be due. False: this ends.
  bool NextRequest(v1::HoldResidualsRequest* request) ABSL_LOCKS_EXCLUDED(mutex_);
  void Take(const v1::HoldResidualsRequest& request, const v1::HoldResidualsResponse& response)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::shared_ptr<BearerToken> token_;
  const Options options_;
  mutable absl::Mutex mutex_;
  std::set<std::string> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> confirmed_ ABSL_GUARDED_BY(mutex_);  // by this stream; part of held_
  std::set<std::string> unsaid_ ABSL_GUARDED_BY(mutex_);     // to this stream; part of held_
  std::set<std::string> released_ ABSL_GUARDED_BY(mutex_);   // likewise unsaid
  absl::Status trouble_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the open stream
  std::thread thread_;  // from the first Hold on; the destructor's and, under mutex_, Hold's
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_
