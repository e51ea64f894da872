// CallRegistry: the calls in flight of one client. The client ends them before it releases its
// channels.
#ifndef RINGATTN_CLIENT_CALL_CALL_REGISTRY_H_
#define RINGATTN_CLIENT_CALL_CALL_REGISTRY_H_

#include <functional>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ringattn::client {

// Thread safe.
class CallRegistry {
 public:
  // `cancel` ends the call soon. It is called at most once and without a lock. It must not own the
  // call.
  void Add(const void* call, std::function<void()> cancel) {
    const absl::MutexLock lock(&mutex_);
    calls_.emplace(call, std::move(cancel));
  }

  void Remove(const void* call) {
    const absl::MutexLock lock(&mutex_);
    calls_.erase(call);
  }

  // Cancels all calls and waits until they are removed.
  void CancelAllAndWait() {
    std::map<const void*, std::function<void()>> calls;
    {
      const absl::MutexLock lock(&mutex_);
      calls = calls_;
    }
    for (const auto& [call, cancel] : calls) cancel();
    calls.clear();
    const absl::MutexLock lock(&mutex_, absl::Condition(this, &CallRegistry::IsEmpty));
  }

 private:
  bool IsEmpty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_.empty(); }

  absl::Mutex mutex_;
  std::map<const void*, std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CALL_REGISTRY_H_
