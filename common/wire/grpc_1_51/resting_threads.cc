#include "common/wire/grpc_1_51/resting_threads.h"

#include <list>

#include <grpcpp/generic/generic_stub.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/wire/grpc_1_51/callback_call.h"

namespace ringattn::wire {
namespace {

// What RestingThreads and ManyCallbacks share, because the threads are the process's.
struct Rest {
  absl::Mutex mutex;
  int users ABSL_GUARDED_BY(mutex) = 0;         // instances of ManyCallbacks
  bool allowed ABSL_GUARDED_BY(mutex) = false;  // threads that rest may continue to do so
  bool stops ABSL_GUARDED_BY(mutex) = false;
  int begun ABSL_GUARDED_BY(mutex) = 0;    // calls whose callbacks have not ended
  int resting ABSL_GUARDED_BY(mutex) = 0;  // threads in such a callback

  static Rest& Get() {
    static auto* const rest = new Rest;
    return *rest;
  }
  bool Unwanted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return users == 0 || stops; }
  bool Wanted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return users > 0 || stops; }
  bool Over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return !allowed || stops; }
  bool AllEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return begun == 0; }
};

// Runs on a callback thread, and holds it until the rest is over.
void RestUntilOver() {
  Rest& rest = Rest::Get();
  absl::MutexLock lock(&rest.mutex);
  ++rest.resting;
  rest.mutex.Await(absl::Condition(&rest, &Rest::Over));
  --rest.resting;
  --rest.begun;
}

}  // namespace

RestingThreads::RestingThreads(int count, absl::Duration linger) : count_(count), linger_(linger) {
  if (count_ > 0) thread_ = std::thread([this] { Run(); });
}

RestingThreads::~RestingThreads() {
  if (!thread_.joinable()) return;
  Rest& rest = Rest::Get();
  {
    absl::MutexLock lock(&rest.mutex);
    rest.stops = true;
  }
  thread_.join();
  absl::MutexLock lock(&rest.mutex);
  rest.stops = false;
}

int RestingThreads::resting() {
  Rest& rest = Rest::Get();
  absl::MutexLock lock(&rest.mutex);
  return rest.resting;
}

void RestingThreads::Run() {
  Rest& rest = Rest::Get();
  grpc::GenericStub stub(UnconnectedChannel());
  while (true) {
    {
      absl::MutexLock lock(&rest.mutex, absl::Condition(&rest, &Rest::Unwanted));
      if (!rest.stops) {
        const absl::Condition wanted(&rest, &Rest::Wanted);
        if (rest.mutex.AwaitWithTimeout(wanted, linger_) && !rest.stops) continue;
      }
      if (rest.stops) return;
      rest.allowed = true;
      rest.begun = count_;
    }
    std::list<CallbackCall> calls;
    for (int i = 0; i < count_; ++i) calls.emplace_back(stub, RestUntilOver);
    // The callbacks of an earlier rest must have ended, or more threads than `count_` would rest.
    const absl::MutexLock lock(&rest.mutex, absl::Condition(&rest, &Rest::AllEnded));
  }
}

ManyCallbacks::ManyCallbacks() {
  Rest& rest = Rest::Get();
  absl::MutexLock lock(&rest.mutex);
  ++rest.users;
  rest.allowed = false;
}

ManyCallbacks::~ManyCallbacks() {
  Rest& rest = Rest::Get();
  absl::MutexLock lock(&rest.mutex);
  --rest.users;
}

}  // namespace ringattn::wire
