#include "worker/operation/cut_off.h"

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace ringattn::worker {

struct CutOff::Call {
  absl::Mutex mutex;
  grpc::CallbackServerContext* context ABSL_GUARDED_BY(mutex) = nullptr;  // null: disarmed
};

CutOff::CutOff(grpc::CallbackServerContext* context) : call_(std::make_shared<Call>()) {
  absl::MutexLock lock(&call_->mutex);
  call_->context = context;
}

CutOff::~CutOff() {
  absl::MutexLock lock(&call_->mutex);
  call_->context = nullptr;
}

void CutOff::Arm(absl::Duration time) {
  if (alarm_.has_value()) return;
  alarm_.emplace();
  alarm_->Set(absl::ToChronoTime(absl::Now() + time), [call = call_](bool passed) {
    if (!passed) return;
    absl::MutexLock lock(&call->mutex);
    if (call->context != nullptr) call->context->TryCancel();
  });
}

}  // namespace ringattn::worker
