// CopiedCall: what calls have in common that the library makes on copies of the caller's tensors:
// who waits for them, who cancels them, until when they may take, and how they end.
#ifndef RINGATTN_CLIENT_CALL_COPIED_CALL_H_
#define RINGATTN_CLIENT_CALL_COPIED_CALL_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/call/call_registry.h"
#include "client/call/operation.h"

namespace ringattn::client {

// Thread safe for waiting and cancelling; the rest is one thread's at a time, whose turn it is. A
// call is kept alive by the work that is to come: a copy's end, the `done` of the call that it
// makes.
class CopiedCall : public Operation::State {
 public:
  const std::string& request_id() const final { return request_id_; }
  CallResult Wait() final ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() final ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  // `deadline`: from now on, copies included.
  CopiedCall(std::string request_id, absl::Duration deadline)
      : request_id_(std::move(request_id)), deadline_(deadline) {}

  bool IsCancelled() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Why it must not go on: it was cancelled, or it is too late.
  std::optional<absl::Status> Stopped() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::chrono::steady_clock::time_point began() const { return began_; }
  double seconds() const;  // since then

  // Makes the call on the copies, within what is left of the deadline, which is cancelled with
  // this one from then on. Its end may come before this returns. One that is made later takes its
  // place.
  void Make(const std::function<Operation(absl::Duration deadline)>& start)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // A report of the call that was made, as of this one, which began so many seconds before it.
  void SetTimes(double seconds_before, CallReport* report) const;

  // Waiters go on. The last of all: the client, and this, may be gone from here on. What refers to
  // the caller's must have been let go of.
  void Conclude(CallResult result, const std::shared_ptr<CallRegistry>& registry)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  bool HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return result_.has_value(); }
  absl::Duration TimeLeft() const { return deadline_ - absl::FromChrono(Clock::now() - began_); }

  const std::string request_id_;
  const absl::Duration deadline_;
  const Clock::time_point began_ = Clock::now();

  mutable absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;  // made
  std::optional<Operation> call_ ABSL_GUARDED_BY(mutex_);
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

// Begins a call of a class derived from CopiedCall, whose end takes it out of the registry.
template <typename Call>
Operation StartCopiedCall(const std::shared_ptr<Call>& call, CallRegistry& registry) {
  registry.Add(call.get(), [weak = std::weak_ptr<Call>(call)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
  call->Start();
  return Operation(call);
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_COPIED_CALL_H_
