// CudaWireEngine: transfers between GPUs of different hosts over sockets. Bytes pass through pinned
// memory in chunks: the sender's copy engine fills a slot, a connection carries it, and the
// receiver's copy engine empties a slot. So no SM takes part, and copies of later chunks overlap
// with the network.
//
//   the lane's stream   ... | reached = n | wait done >= n ...
//   thread ring_copies  sees reached = n, posts group n; copies chunks that receivers have granted
//                       from the device, and chunks that have arrived to it; when all transfers of
//                       the group have ended, done = n
//   threads of loops    move slots between sockets and this host (WireEngine)
//
// A receive is granted once the stream has reached its group, because its memory is free then.
// Copies therefore never wait for a stream, and groups of both lanes share the two copy streams.
//
// Tests: wire_cuda_faults_test.cc, wire_cuda_rings_under_test.cc
#ifndef RINGATTN_WORKER_COMM_WIRE_CUDA_CUDA_WIRE_ENGINE_H_
#define RINGATTN_WORKER_COMM_WIRE_CUDA_CUDA_WIRE_ENGINE_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/program/lane.h"
#include "worker/comm/cuda/stream_flags.h"
#include "worker/comm/cuda/transfer_engine.h"
#include "worker/comm/wire/wire_connector.h"
#include "worker/comm/wire/wire_engine.h"
#include "worker/comm/wire/wire_staging.h"
#include "worker/comm/wire_cuda/copy_line.h"
#include "worker/comm/wire_cuda/slot_pool.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

// The name of the transport (Communicator::transport).
inline constexpr char kWireTransport[] = "wire";

struct CudaWireOptions {
  // Slots of 1 MiB in each direction. A peer that takes no bytes keeps WireEngine::kStagedPerPeer.
  int slots = 32;
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string&)> on_stuck;  // may be null
};

// Thread safe, as TransferEngine requires. A lost peer ends the transfers with it only.
class CudaWireEngine : public TransferEngine, private WireStaging {
 public:
  // Returns INTERNAL if streams or memory cannot be created, FAILED_PRECONDITION if the driver
  // lacks stream memory operations.
  static absl::StatusOr<std::unique_ptr<CudaWireEngine>> Create(
      CudaWireOptions options, CudaEventPool* events, WireConnector::Joined joined,
      std::shared_ptr<WireCounters> counters);
  ~CudaWireEngine() override;

  std::string transport(int) const override { return kWireTransport; }
  bool takes_compute_units(int) const override { return false; }
  bool has_lanes() const override { return true; }
  absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                       const std::shared_ptr<GroupFailure>& failure) override;
  bool LosePeer(int peer, const std::string& reason) override;
  absl::Status AsyncError() override { return absl::OkStatus(); }
  void Interrupt() override;
  // Copies in flight end within milliseconds. Kernels that the streams wait for must end without
  // help.
  void Abort() override;

 private:
  // A group that has been enqueued and has not ended.
  struct Group {
    uint64_t number = 0;  // in its lane, from 1
    std::vector<PeerTransfer> transfers;
    std::shared_ptr<GroupFailure> failure;
  };
  // The groups of one lane.
  struct LaneState {
    cudaStream_t stream = nullptr;
    StreamWord reached;     // by the stream: the number of the last group
    StreamWord done;        // the same for its end
    uint64_t enqueued = 0;  // used by Enqueue only
    std::deque<Group> fresh;
    std::optional<absl::Status> ended;  // the group in progress
    // Used by the thread only.
    std::deque<Group> waiting;
    bool in_progress = false;  // the first of them
  };

  CudaWireEngine(CudaWireOptions options, CudaEventPool* events, const StreamFlags* flags,
                 int rank);
  absl::Status Open();
  absl::StatusOr<size_t> LaneOf(cudaStream_t stream);

  void OnSends() override { Notify(); }
  char* TakeReceiveSlot() override { return receive_slots_.Take(); }
  void OnReceived(const WireCopy& copy) override;
  void ReturnReceiveSlot(char* slot) override { receive_slots_.Return(slot); }
  void ReturnSendSlot(char* slot) override;
  void OnGroupEnd(Lane lane, const absl::Status& status) override;
  void Notify();

  void Run();
  // Does what can be done now. Returns false if that is nothing.
  bool Advance();
  bool BeginGroups();
  bool EndGroups();
  bool StartCopies();
  // Returns how long the thread may sleep. Streams cannot wake it.
  absl::Duration Patience() const;
  // Returns true once nothing is in progress.
  bool AtRest() const;

  const CudaWireOptions options_;
  CudaEventPool* const events_;
  const StreamFlags* const flags_;
  const int rank_;
  uint64_t* words_ = nullptr;  // pinned
  SlotPool send_slots_;
  SlotPool receive_slots_;
  std::unique_ptr<CopyLine> from_device_;
  std::unique_ptr<CopyLine> to_device_;
  std::unique_ptr<WireEngine> engine_;

  // Acquired after the engine's mutex. No CUDA call is made under it, because such a call may wait
  // for a stream.
  absl::Mutex mutex_;
  absl::CondVar changed_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
  bool interrupted_ ABSL_GUARDED_BY(mutex_) = false;
  bool thread_is_done_ ABSL_GUARDED_BY(mutex_) = false;
  std::array<LaneState, kLanes> lanes_;  // `stream`, `fresh` and `ended` are guarded by the mutex
  std::vector<WireCopy> received_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex ending_;  // held during Abort
  bool ended_ ABSL_GUARDED_BY(ending_) = false;

  std::thread thread_;  // last: uses the other members. Ends after Interrupt()
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_CUDA_CUDA_WIRE_ENGINE_H_
