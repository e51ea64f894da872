// NcclRingTransport: forms rings of GPUs over NCCL. Rank 0's blob carries NCCL's unique id, from
// which Connect creates a non-blocking communicator. NCCL's connections are neither encrypted nor
// authenticated, so a private network is assumed.
//
// Tests: nccl_faults_test.cc, nccl_rings_under_test.cc
#ifndef RINGATTN_WORKER_COMM_NCCL_NCCL_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_NCCL_NCCL_RING_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/cuda/engine_transport.h"
#include "worker/comm/nccl/nccl_library.h"
#include "worker/comm/ring_attempts.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

struct NcclTransportOptions {
  int device = 0;  // CUDA device index
  // Time limit for one group of transfers, from the moment at which it can start. Large, because a
  // slow rank is not an error; the coordinator decides which rank has stalled a ring.
  absl::Duration step_timeout = absl::Minutes(10);
  // Upper limit of Connect, even if its deadline is later.
  absl::Duration connect_timeout = absl::Seconds(30);
  // SMs that transfers may occupy. A channel moves about 21 GB/s between H200s (NCCL 2.28.9,
  // measured). Four exchange 8K bf16 tokens per GPU (34 MB of K/V, 8 heads of 128) in the 1.4 ms
  // that their products take, and leave 128 of 132 SMs.
  int max_ctas = 4;
  // Time limit for ending a communicator, including queued transfers. After it `on_stuck` is
  // called, which should end the process, because NCCL's resources cannot be freed otherwise.
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string& what)> on_stuck;
  // libnccl.so.2; empty: see NcclLibrary::Load.
  std::string library;
};

// Thread safe. Each Connect creates a new communicator. If this is rank 0 of a failed or abandoned
// ring, NCCL's listening thread remains until the process ends, because NCCL has no call to end it.
class NcclRingTransport : public EngineTransport {
 public:
  // Returns NOT_FOUND or FAILED_PRECONDITION without a usable libnccl (NcclLibrary::Load), or
  // INTERNAL if the device cannot be used.
  static absl::StatusOr<std::unique_ptr<NcclRingTransport>> Create(NcclTransportOptions options);

  ~NcclRingTransport() override;

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  // Ends with one exchange between every two ranks. A formed ring therefore works, and no later
  // step waits for NCCL's lazy connections. Returns INVALID_ARGUMENT if two ranks use one GPU.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  absl::StatusOr<std::string> PrepareEngine(uint64_t generation, int rank,
                                            int world_size) override {
    return Prepare(generation, rank, world_size);
  }
  // All ranks join one NCCL communicator, so every rank of the ring must call it. NCCL connects two
  // ranks at their first transfer.
  absl::StatusOr<std::unique_ptr<TransferEngine>> ConnectEngine(
      uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>& peers,
      absl::Time deadline) override;
  void Cancel() override { attempts_.Cancel(); }

  const std::string& nccl_version() const { return library_->version(); }

 private:
  NcclRingTransport(NcclTransportOptions options, const NcclLibrary* library, CudaEventPool* events,
                    std::string device_uuid);

  absl::StatusOr<std::unique_ptr<Communicator>> Join(const RingAttempt& attempt,
                                                     const std::string& unique_id,
                                                     absl::Time deadline) const;
  absl::StatusOr<std::unique_ptr<TransferEngine>> MakeEngine(const RingAttempt& attempt,
                                                             const std::string& unique_id,
                                                             absl::Time deadline) const;

  const NcclTransportOptions options_;
  const NcclLibrary* const library_;
  CudaEventPool* const events_;
  const std::string device_uuid_;

  RingAttempts attempts_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_NCCL_RING_TRANSPORT_H_
