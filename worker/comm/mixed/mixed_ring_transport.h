// MixedRingTransport: forms rings of GPU workers. Ranks that share memory exchange by copy engines,
// all others over the network, by NCCL or sockets. A ring within one machine uses copy engines
// only, and a ring whose ranks share no memory uses the network only. Every rank derives the choice
// from the blobs of all ranks (RingPaths, ChooseNetwork).
//
// Tests: mixed_faults_test.cc, mixed_rings_under_test.cc
#ifndef RINGATTN_WORKER_COMM_MIXED_MIXED_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_MIXED_MIXED_RING_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/cuda/engine_transport.h"
#include "worker/comm/mixed/ring_paths.h"
#include "worker/comm/ring_attempts.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct MixedTransportOptions {
  int device = 0;  // CUDA device index
  // Copy engines; null: this rank cannot share memory.
  std::unique_ptr<EngineTransport> copies;
  // NCCL and sockets; null: this rank has none, or does not offer them.
  std::unique_ptr<EngineTransport> nccl;
  std::unique_ptr<EngineTransport> wire;
  // Forms rings of one, and rejects others with the reason why a network is missing. Not null if
  // `nccl` and `wire` are null.
  std::unique_ptr<RingTransport> without_network;
  // The properties of this rank that decide between NCCL and sockets, without blobs.
  MixedBlob facts = {};
  // Allocates memory that `copies` can share, for the first exchange. Must be callable while the
  // transport lives.
  std::function<absl::StatusOr<std::unique_ptr<DeviceBuffer>>(int64_t bytes)> allocate;
  absl::Duration step_timeout = absl::Minutes(10);     // see NcclTransportOptions
  absl::Duration connect_timeout = absl::Seconds(30);  // see NcclTransportOptions
  // Called by Connect with the choice, for the log and metrics. May be null.
  std::function<void(const RingPaths& paths)> on_choice;
};

// Thread safe.
class MixedRingTransport : public RingTransport {
 public:
  // Returns INTERNAL if the device cannot be used.
  static absl::StatusOr<std::unique_ptr<MixedRingTransport>> Create(MixedTransportOptions options);
  ~MixedRingTransport() override;

  // Fails if sockets cannot be prepared, or if neither copy engines nor a network can.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  // In addition to the errors of RingTransport: FAILED_PRECONDITION if ranks cannot exchange
  // (ChoosePaths), or if memory cannot be mapped. After the latter has happened kGiveUpAfter times
  // in a row, this rank does not offer copy engines any more.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override;

  static constexpr int kGiveUpAfter = 3;

 private:
  using Joined = RingAttempts::Joined;
  // All members' blobs, by rank.
  struct Blobs {
    std::vector<std::string> copies;
    std::vector<std::string> nccl;
    std::vector<std::string> wire;
  };

  MixedRingTransport(MixedTransportOptions options, CudaEventPool* events)
      : options_(std::move(options)), events_(events) {}

  // Returns what carries rings without copy engines; null if this rank lacks the engine.
  RingTransport* Alone(NetworkEngine engine) const;
  void CancelParts();
  // Cancels the other network transports.
  void CancelAllBut(const RingTransport* chosen);
  Joined Join(const RingAttempt& attempt, const std::vector<std::string>& blobs,
              absl::Time deadline);
  Joined JoinMixed(const RingAttempt& attempt, const Blobs& blobs, const RingPaths& paths,
                   absl::Time deadline);
  absl::StatusOr<std::unique_ptr<TransferEngine>> MakeEngine(const RingAttempt& attempt,
                                                             const Blobs& blobs,
                                                             const RingPaths& paths,
                                                             absl::Time deadline);
  // Counts failures of copy engines in a row.
  void NoteCopies(const absl::Status& connected);

  const MixedTransportOptions options_;
  CudaEventPool* const events_;
  RingAttempts attempts_;

  absl::Mutex mutex_;
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;  // of copy engines, in a row
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_MIXED_RING_TRANSPORT_H_
