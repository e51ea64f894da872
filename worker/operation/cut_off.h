// CutOff: the end of a call whose peer takes neither what was sent nor the status. gRPC keeps such
// a call, and whatever it would still send, for as long as the connection lives.
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
  // `context` outlives it.
  explicit CutOff(grpc::CallbackServerContext* context);
  // The call is left alone from here on.
  ~CutOff();

  // Cancels the call when `time` has passed. Of several calls the first counts.
  void Arm(absl::Duration time);

 private:
  // The alarm's too, whose callback may come late.
  struct Call;

  const std::shared_ptr<Call> call_;
  std::optional<grpc::Alarm> alarm_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_CUT_OFF_H_
