// Reservations: turns Reserve messages into operations.
//
// Decoding takes time in proportion to the number of documents: 0.2 s of CPU time for 2^17. Each
// segment of a dilated level counts as a document for each of its offsets. Requests that may have
// more than kManyDocuments are decoded one at a time on a low-priority thread. Other messages, such
// as the Reserve of a small request, do not wait for them.
//
// A request that equals an earlier one of the same principal takes that one's operation, if it is
// still kept (KeptOperations), and is not decoded. A Reserve with prepare_only makes a kept
// operation without a request.
#ifndef RINGATTN_WORKER_SERVICE_RESERVATIONS_H_
#define RINGATTN_WORKER_SERVICE_RESERVATIONS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/device/device.h"
#include "worker/device/host_queue.h"
#include "worker/executor/operation.h"
#include "worker/operation/kept_operations.h"
#include "worker/operation/operation_registry.h"
#include "worker/operation/residual.h"

namespace ringattn::worker {

// This worker's rank in the ring.
struct RingMembership {
  int rank = 0;
  int world_size = 0;
  KeyArrival arrival;
  std::vector<int> hosts;  // by rank, as in Commit; empty: all ranks are on one host
};

// Not thread safe: used on the control thread only.
class Reservations {
 public:
  // Called on the control thread when a Reserve has succeeded or failed. Not called for
  // reservations that ForgetAll dropped.
  using Done = std::function<void(const v1::Reserve& reserve,
                                  absl::StatusOr<std::shared_ptr<ShardOperation>> operation,
                                  int64_t workspace_bytes)>;
  // The result of a Reserve with prepare_only.
  struct Preparation {
    int64_t bytes = 0;
    bool found = false;  // an equal operation was kept or in use already
  };
  // As Done. FAILED_PRECONDITION: the operation may not be kept.
  using PreparationDone =
      std::function<void(const v1::Reserve& reserve, const absl::StatusOr<Preparation>& made,
                         int64_t workspace_bytes)>;
  // Runs a function on the control thread, in the order of calls. Thread safe.
  using RunOnControl = std::function<void(std::function<void()>)>;

  // `device`, `registry`, `residuals`, `kept` and `background` must outlive this object. This
  // object must outlive the functions that it passes to RunOnControl.
  Reservations(Device* device, OperationRegistry* registry, const ResidualStore* residuals,
               KeptOperations* kept, HostQueue* background, RunOnControl on_control, Done done,
               PreparationDone on_prepared);

  // Calls `done`, or `on_prepared` if the message has prepare_only, before this returns unless the
  // request may have many documents and no equal operation is kept. The result is NOT_FOUND if the
  // residual that it names does not exist here.
  void Reserve(std::shared_ptr<v1::Reserve> reserve, RingMembership place);

  // Like OperationRegistry::Release; also releases an operation that is still being decoded. The
  // release is reported at once, without waiting for the decoder.
  void Release(const std::string& id, uint64_t generation);

  // The ring has ended: drops the reservations that are being decoded, without calling `done`.
  void ForgetAll();

 private:
  // A Reserve and what it needs to be decoded.
  struct Pending {
    std::shared_ptr<const v1::Reserve> reserve;
    RingMembership place;
    std::shared_ptr<const Residual> residual;   // that it reads; null: none
    std::shared_ptr<const std::string> recipe;  // OperationInfo::recipe
    std::atomic<bool> cancelled{false};
  };
  using Decoded = absl::StatusOr<std::unique_ptr<Operation>>;

  void DecodeInBackground(const std::shared_ptr<Pending>& pending);
  void Finish(const std::shared_ptr<Pending>& pending, Decoded operation);
  // Returns true if the device lacked memory for the operation, and kept operations have been
  // evicted since. Nothing has then been reported.
  bool AdmitUnlessEvicted(const Pending& pending, Decoded operation);
  bool KeepUnlessEvicted(const Pending& pending, std::unique_ptr<Operation> operation);
  // Extends the lease of an equal operation and reports it. Returns false if there is none.
  bool Renew(const Pending& pending);
  void Fail(const v1::Reserve& reserve, const absl::Status& status, int64_t workspace_bytes = 0);

  Device* const device_;
  OperationRegistry* const registry_;
  const ResidualStore* const residuals_;
  KeptOperations* const kept_;
  HostQueue* const background_;
  const RunOnControl on_control_;
  const Done done_;
  const PreparationDone on_prepared_;
  std::map<std::string, std::shared_ptr<Pending>> pending_;  // by operation id
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RESERVATIONS_H_
