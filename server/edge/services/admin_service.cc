#include "server/edge/services/admin_service.h"

#include <algorithm>
#include <utility>

#include "common/observability/log.h"
#include "common/security/secret.h"

namespace ringattn::server {

// A unary call that waits for the core or for its own cancellation, whichever is first. Thread
// safe. Shared by gRPC (until OnDone) and the waiting list.
class AdminWaiter final : public grpc::ServerUnaryReactor {
 public:
  static std::shared_ptr<AdminWaiter> Make() {
    auto waiter = std::make_shared<AdminWaiter>();
    waiter->self_ = waiter;
    return waiter;
  }

  void Complete(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(completed_, true)) return;
    Finish(status);
  }
  // `fill` runs only while gRPC keeps the response.
  template <typename Fill>
  void Complete(const grpc::Status& status, Fill fill) {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(completed_, true)) return;
    fill();
    Finish(status);
  }

  bool completed() {
    absl::MutexLock lock(&mutex_);
    return completed_;
  }

  v1::ReformRingResponse* response = nullptr;  // ReformRing only; owned by gRPC until completed

  void OnCancel() override { Complete(grpc::Status::CANCELLED); }
  void OnDone() override { std::move(self_).reset(); }

 private:
  std::shared_ptr<AdminWaiter> self_;
  absl::Mutex mutex_;
  bool completed_ ABSL_GUARDED_BY(mutex_) = false;
};

namespace {

// Removes cancelled calls when the next one arrives.
void Add(std::shared_ptr<AdminWaiter> waiter, std::vector<std::shared_ptr<AdminWaiter>>* to) {
  to->erase(
      std::remove_if(to->begin(), to->end(), [](const auto& other) { return other->completed(); }),
      to->end());
  to->push_back(std::move(waiter));
}

}  // namespace

AdminServiceImpl::AdminServiceImpl(CoreLoop* core, std::string secret)
    : core_(core), secret_(std::move(secret)) {}

AdminServiceImpl::~AdminServiceImpl() = default;

grpc::ServerUnaryReactor* AdminServiceImpl::Drain(grpc::CallbackServerContext* call,
                                                  const v1::DrainRequest* request,
                                                  v1::DrainResponse*) {
  const std::shared_ptr<AdminWaiter> waiter = AdminWaiter::Make();
  if (grpc::Status status = CheckSecret(*call, secret_); !status.ok()) {
    waiter->Complete(status);
  } else if (request->undo()) {
    LogInfo("drain undone by an operator");
    core_->Post(DrainRequested{true}, [waiter] { waiter->Complete(grpc::Status::OK); });
  } else {
    LogInfo("drain requested by an operator");
    {
      absl::MutexLock lock(&mutex_);
      Add(waiter, &drains_);
    }
    core_->Post(DrainRequested{});
  }
  return waiter.get();
}

grpc::ServerUnaryReactor* AdminServiceImpl::ReformRing(grpc::CallbackServerContext* call,
                                                       const v1::ReformRingRequest*,
                                                       v1::ReformRingResponse* response) {
  const std::shared_ptr<AdminWaiter> waiter = AdminWaiter::Make();
  waiter->response = response;
  if (grpc::Status status = CheckSecret(*call, secret_); !status.ok()) {
    waiter->Complete(status);
    return waiter.get();
  }
  LogInfo("re-forming requested by an operator");
  {
    absl::MutexLock lock(&mutex_);
    Add(waiter, &reforms_);
  }
  core_->Post(ReformRequested{});
  return waiter.get();
}

void AdminServiceImpl::OnDrained() {
  Waiters waiters;
  {
    absl::MutexLock lock(&mutex_);
    waiters.swap(drains_);
    ++drained_count_;
  }
  for (const auto& waiter : waiters) waiter->Complete(grpc::Status::OK);
}

void AdminServiceImpl::OnReformed(const RingReformed& reformed) {
  Waiters waiters;
  {
    absl::MutexLock lock(&mutex_);
    waiters.swap(reforms_);
  }
  const grpc::Status status(static_cast<grpc::StatusCode>(reformed.status.code()),
                            std::string(reformed.status.message()));
  for (const auto& waiter : waiters) {
    waiter->Complete(status, [&] { waiter->response->set_generation(reformed.generation); });
  }
}

bool AdminServiceImpl::DrainAndWait(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const int64_t before = drained_count_;
  core_->Post(DrainRequested{});
  const auto drained = [this, before] {
    mutex_.AssertHeld();
    return drained_count_ > before;
  };
  return mutex_.AwaitWithTimeout(absl::Condition(&drained), timeout);
}

void AdminServiceImpl::Close() {
  Waiters waiters;
  {
    absl::MutexLock lock(&mutex_);
    waiters.swap(drains_);
    waiters.insert(waiters.end(), reforms_.begin(), reforms_.end());
    reforms_.clear();
  }
  for (const auto& waiter : waiters) {
    waiter->Complete(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
  }
}

}  // namespace ringattn::server
