#include "common/wire/grpc_1_51/keep_awake.h"

#include <thread>

#include <grpcpp/generic/generic_stub.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/wire/grpc_1_51/callback_call.h"

namespace ringattn::wire {
namespace {

// A quarter of the second after which gRPC's threads sleep.
constexpr absl::Duration kInterval = absl::Milliseconds(250);

// Produces events while it has users. Lives until the process ends, because its thread, which then
// waits for a user, may outlive main.
class Pulse {
 public:
  static Pulse& Get() {
    static auto* const pulse = new Pulse;
    return *pulse;
  }

  void AddUser() {
    absl::MutexLock lock(&mutex_);
    ++users_;
    if (started_) return;
    started_ = true;
    std::thread([this] { Run(); }).detach();
  }

  // Returns after the thread has stopped using gRPC, unless a new user has arrived in the meantime:
  // then the thread may not notice the gap between users.
  void RemoveUser() {
    absl::MutexLock lock(&mutex_);
    if (--users_ == 0) mutex_.Await(absl::Condition(this, &Pulse::IdleOrWanted));
  }

 private:
  bool Wanted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return users_ > 0; }
  bool Unwanted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return users_ == 0; }
  bool IdleOrWanted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return idle_ || Wanted(); }
  bool Answered() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return answered_; }

  void Run() {
    while (true) {
      {
        absl::MutexLock lock(&mutex_);
        idle_ = true;
        mutex_.Await(absl::Condition(this, &Pulse::Wanted));
        idle_ = false;
      }
      BeatWhileWanted();
    }
  }

  void BeatWhileWanted() {
    grpc::GenericStub stub(UnconnectedChannel());
    while (true) {
      Beat(stub);
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(this, &Pulse::Unwanted), kInterval)) return;
    }
  }

  void Beat(grpc::GenericStub& stub) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      answered_ = false;
    }
    const CallbackCall call(stub, [this] {
      absl::MutexLock lock(&mutex_);
      answered_ = true;
    });
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &Pulse::Answered));
  }

  absl::Mutex mutex_;
  int users_ ABSL_GUARDED_BY(mutex_) = 0;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool idle_ ABSL_GUARDED_BY(mutex_) = true;
  bool answered_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

KeepAwake::KeepAwake() { Pulse::Get().AddUser(); }
KeepAwake::~KeepAwake() { Pulse::Get().RemoveUser(); }

}  // namespace ringattn::wire
