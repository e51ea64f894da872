// Preparations: the prepared calls of one client, which it renews.
// Tests: prepared_call_test.cc.
#ifndef RINGATTN_CLIENT_CALL_PREPARATIONS_H_
#define RINGATTN_CLIENT_CALL_PREPARATIONS_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/api/pending_call.h"
#include "client/api/prepared_call.h"
#include "client/call/attempt.h"

namespace ringattn::client {

// Thread safe.
class Preparations {
 public:
  using Start = std::function<PendingCall(std::shared_ptr<const CallPlan>, absl::Duration deadline,
                                          const std::function<void(const CallResult&)>& done)>;

  // `start` starts a call. It is called until Stop().
  explicit Preparations(Start start) : start_(std::move(start)) {}
  ~Preparations() { Stop(); }

  Preparations(const Preparations&) = delete;
  Preparations& operator=(const Preparations&) = delete;

  // Makes the call and keeps its plan for renewals. Blocks.
  absl::StatusOr<PreparedCall> Prepare(CallPlan plan, absl::Duration deadline)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Renews nothing any more. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Part;

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgets parts without handles. Returns those whose renewal is due, and sets the next one.
  std::vector<std::shared_ptr<Part>> TakeDue(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Renew(const std::shared_ptr<Part>& part);

  const Start start_;
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<Part>> parts_ ABSL_GUARDED_BY(mutex_);
  bool grown_ ABSL_GUARDED_BY(mutex_) = false;  // since the thread looked
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // from the first part on; joined by Stop
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_PREPARATIONS_H_
