// CudaWireTransport: forms rings of GPUs over sockets (WireConnector), in which CudaWireEngine
// moves the bytes.
//
// Tests: wire_cuda_faults_test.cc, wire_cuda_rings_under_test.cc
#ifndef RINGATTN_WORKER_COMM_WIRE_CUDA_CUDA_WIRE_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_WIRE_CUDA_CUDA_WIRE_TRANSPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/cuda/engine_transport.h"
#include "worker/comm/wire/wire_connector.h"
#include "worker/comm/wire_cuda/cuda_wire_engine.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

// A connection carried 2.6 GB/s in both directions at once, with a core at each end, and 0.8 GB/s
// with TLS (tests/bench/results/wire_rate.csv). So these suffice for 25 Gbit/s.
inline constexpr int kDefaultCudaWireConnections = 4;
inline constexpr int kDefaultCudaWireTlsConnections = 8;

struct CudaWireTransportOptions {
  int device = 0;  // CUDA device index
  WireTransportOptions wire;
  CudaWireOptions engine;
};

// Thread safe.
class CudaWireTransport : public EngineTransport {
 public:
  // Returns INTERNAL if the device cannot be used.
  static absl::StatusOr<std::unique_ptr<CudaWireTransport>> Create(
      CudaWireTransportOptions options);
  ~CudaWireTransport() override { Cancel(); }

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    return connector_.Prepare(generation, rank, world_size);
  }
  // Returns FAILED_PRECONDITION, too, if some ranks use TLS and others do not.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  absl::StatusOr<std::string> PrepareEngine(uint64_t generation, int rank,
                                            int world_size) override {
    return Prepare(generation, rank, world_size);
  }
  // Connects to the peers. Requires the blobs of all ranks, because the ring's token depends on
  // them.
  absl::StatusOr<std::unique_ptr<TransferEngine>> ConnectEngine(
      uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>& peers,
      absl::Time deadline) override;
  void Cancel() override { connector_.Cancel(); }

 private:
  CudaWireTransport(CudaWireTransportOptions options, CudaEventPool* events)
      : options_(std::move(options)), events_(events), connector_(options_.wire) {}

  const CudaWireTransportOptions options_;
  CudaEventPool* const events_;
  WireConnector connector_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_CUDA_CUDA_WIRE_TRANSPORT_H_
