// LeaseHold: renews leases of objects at the service by a stream (HoldResiduals, HoldCaches). If
// this process dies, they expire within the server's grace. A broken connection is reopened before
// that.
// Tests: residual_hold_test.cc.
#ifndef RINGATTN_CLIENT_CALL_LEASE_HOLD_H_
#define RINGATTN_CLIENT_CALL_LEASE_HOLD_H_

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

// One stream that renews leases. Used by one thread.
class LeaseStream {
 public:
  virtual ~LeaseStream() = default;
  // Sends one request and reads its answer. (*gone)[i] becomes true if held[i] no longer exists.
  // Returns false if the stream has ended.
  virtual bool Exchange(const std::vector<std::string>& held,
                        const std::vector<std::string>& released, std::vector<bool>* gone) = 0;
  virtual void WritesDone() = 0;
  virtual grpc::Status Finish() = 0;
};

// Thread safe.
class LeaseHold {
 public:
  struct Options {
    // A third of the server's grace (Limits.residual_hold_grace), so that a broken connection is
    // noticed and replaced within the grace.
    absl::Duration sign_of_life = absl::Seconds(3);
    absl::Duration min_backoff = absl::Milliseconds(100);
    absl::Duration max_backoff = absl::Seconds(2);
  };
  using Connect = std::function<std::unique_ptr<LeaseStream>(grpc::ClientContext*)>;

  // `token` may be null. Sends nothing before the first Hold.
  LeaseHold(Connect connect, std::shared_ptr<BearerToken> token, const Options& options);
  // Ends the stream. The leases last for the server's grace.
  ~LeaseHold();

  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;

  // These do not block. An object that has ended need not be released, but its id is remembered
  // until then.
  void Hold(const std::vector<std::string>& ids) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(const std::vector<std::string>& ids) ABSL_LOCKS_EXCLUDED(mutex_);

  // The number of held objects that the server has confirmed and not reported as gone.
  size_t confirmed() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Why nothing is held at the moment; OK while holds are in effect or none was requested. Without
  // a hold, objects expire by their own ttl. UNIMPLEMENTED, from a server without holds, is final.
  absl::Status trouble() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Request {
    std::vector<std::string> held, released;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs one stream until it ends or this object is destroyed.
  absl::Status Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for a request to send, or until a sign of life is due. Returns false on destruction.
  bool NextRequest(Request* request) ABSL_LOCKS_EXCLUDED(mutex_);
  void Take(const Request& request, const std::vector<bool>& gone) ABSL_LOCKS_EXCLUDED(mutex_);

  const Connect connect_;
  const std::shared_ptr<BearerToken> token_;
  const Options options_;
  mutable absl::Mutex mutex_;
  std::set<std::string> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> confirmed_ ABSL_GUARDED_BY(mutex_);  // on this stream; a subset of held_
  std::set<std::string> unsent_ ABSL_GUARDED_BY(mutex_);     // on this stream; a subset of held_
  std::set<std::string> released_ ABSL_GUARDED_BY(mutex_);   // not sent either
  absl::Status trouble_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the open stream
  std::thread thread_;  // from the first Hold on; joined by the destructor
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_LEASE_HOLD_H_
