// Reservations: Reserve messages on their way to becoming operations.
//
// Decoding one takes time in proportion to its documents: 0.2 s of a processor for 2^17 of them. A
// segment of a dilated level is a document too, once for each offset. So those that may have more
// than kManyDocuments are decoded on a thread of their own, at low priority and one after the
// other; what a worker is told meanwhile, above all the Reserve of a small request, does not wait
// for them.
#ifndef RINGATTN_WORKER_SERVICE_RESERVATIONS_H_
#define RINGATTN_WORKER_SERVICE_RESERVATIONS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/device/device.h"
#include "worker/device/host_queue.h"
#include "worker/executor/operation.h"
#include "worker/operation/operation_registry.h"
#include "worker/operation/residual.h"

namespace ringattn::worker {

// This worker's place in the ring.
struct RingMembership {
  int rank = 0;
  int world_size = 0;
  KeyArrival arrival;
};

// Used by one thread at a time, the control thread.
class Reservations {
 public:
  // A Reserve was carried out or refused, on the control thread; never for one that was forgotten.
  using Done = std::function<void(const v1::Reserve& reserve,
                                  absl::StatusOr<std::shared_ptr<ShardOperation>> operation,
                                  int64_t workspace_bytes)>;
  // Runs work on the control thread, in the order of the calls. Thread safe.
  using RunOnControl = std::function<void(std::function<void()>)>;

  // `device`, `registry`, `residuals` and `aside` outlive this; this outlives what was handed to
  // RunOnControl.
  Reservations(Device* device, OperationRegistry* registry, const ResidualStore* residuals,
               HostQueue* aside, RunOnControl on_control, Done done);

  // `done` follows, within the call unless the request has many documents. NOT_FOUND: the
  // residual that it names is not here.
  void Reserve(std::shared_ptr<const v1::Reserve> reserve, RingMembership place);

  // As OperationRegistry::Release, of one that is still being decoded too.
  void Release(const std::string& id, uint64_t generation);

  // The ring is gone, and with it whoever wants to hear of those that are being decoded.
  void ForgetAll();

 private:
  struct Pending {
    uint64_t generation = 0;
    std::atomic<bool> unwanted{false};
  };

  void Finish(const v1::Reserve& reserve, const std::shared_ptr<Pending>& pending,
              absl::StatusOr<std::unique_ptr<Operation>> operation);
  void Admit(const v1::Reserve& reserve, absl::StatusOr<std::unique_ptr<Operation>> operation);

  Device* const device_;
  OperationRegistry* const registry_;
  const ResidualStore* const residuals_;
  HostQueue* const aside_;
  const RunOnControl on_control_;
  const Done done_;
  std::map<std::string, std::shared_ptr<Pending>> pending_;  // by operation id
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RESERVATIONS_H_
