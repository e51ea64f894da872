// CopiedCall: the common part of calls that the library makes on copies of the caller's tensors. It
// handles waiting, cancellation, the deadline and the end.
// Tests: staged_call_test.cc, tests/cuda_memory/cuda_memory_fake_test.cc.
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
#include "client/call/replayed_call.h"

namespace ringattn::client {

// Wait and Cancel are thread safe. Only one thread at a time runs the other methods. Pending work
// (a copy, or the `done` of the inner call) keeps the object alive.
class CopiedCall : public PendingCall::State {
 public:
  const std::string& request_id() const final { return request_id_; }
  CallResult Wait() final ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() final ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  // `deadline` starts now and covers the copies.
  CopiedCall(std::string request_id, absl::Duration deadline)
      : request_id_(std::move(request_id)), deadline_(deadline) {}

  bool IsCancelled() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns why the call must stop: it was cancelled, or its deadline has passed.
  std::optional<absl::Status> Stopped() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::chrono::steady_clock::time_point began() const { return began_; }
  double seconds() const;  // since began()

  // Starts the inner call on the copies with the time that is left. From then on, cancelling this
  // call cancels the inner one. The inner call may end before this returns. A later inner call
  // replaces an earlier one.
  void Make(const std::function<PendingCall(absl::Duration deadline)>& start)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Converts the times of an inner call, which began `seconds_before` after this one, to this
  // call's.
  void SetTimes(double seconds_before, CallReport* report) const;

  // Ends the call and wakes its waiters. This must be the last step: the client and this object may
  // be destroyed afterwards. Release everything that refers to the caller's memory first.
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
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;  // inner calls started
  std::optional<PendingCall> call_ ABSL_GUARDED_BY(mutex_);
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

// Starts a call of a class derived from CopiedCall. Its end removes it from the registry.
template <typename Call>
PendingCall StartCopiedCall(const std::shared_ptr<Call>& call, CallRegistry& registry) {
  registry.Add(call.get(), [weak = std::weak_ptr<Call>(call)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
  call->Start();
  return PendingCall(call);
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_COPIED_CALL_H_
