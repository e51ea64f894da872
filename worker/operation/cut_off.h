// CutOff: a deadline for ending a call whose peer reads neither the pending messages nor the
// status. Without it, gRPC keeps the call and its unsent messages for as long as the connection
// lives.
#ifndef RINGATTN_WORKER_OPERATION_CUT_OFF_H_
#define RINGATTN_WORKER_OPERATION_CUT_OFF_H_

#include <memory>
#include <optional>

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include "absl/time/time.h"

namespace ringattn::worker {

// Thread compatible.
class CutOff {
 public:
  // `context` must outlive this object.
  explicit CutOff(grpc::CallbackServerContext* context);
  // Disarms: the call is not cancelled after this returns.
  ~CutOff();

  // Cancels the call after `time`. Only the first call has an effect.
  void Arm(absl::Duration time);

 private:
  // Shared with the alarm, whose callback may run after this object is destroyed.
  struct Call;

  const std::shared_ptr<Call> call_;
  std::optional<grpc::Alarm> alarm_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_CUT_OFF_H_
