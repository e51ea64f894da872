#include "worker/comm/wire_cuda/cuda_wire_transport.h"

#include <optional>
#include <utility>

#include "worker/comm/cuda/stream_communicator.h"

namespace ringattn::worker {

absl::StatusOr<std::unique_ptr<CudaWireTransport>> CudaWireTransport::Create(
    CudaWireTransportOptions options) {
  absl::StatusOr<CudaEventPool*> events = CudaEventPool::ForDevice(options.device);
  if (!events.ok()) return events.status();
  return std::unique_ptr<CudaWireTransport>(new CudaWireTransport(std::move(options), *events));
}

absl::StatusOr<std::unique_ptr<Communicator>> CudaWireTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  absl::StatusOr<WireConnector::Joined> joined =
      connector_.Connect(generation, blobs, /*peers=*/std::nullopt, deadline);
  if (!joined.ok()) return joined.status();
  const int rank = joined->rank, world_size = joined->world_size;
  std::unique_ptr<TransferEngine> engine;
  if (world_size > 1) {
    absl::StatusOr<std::unique_ptr<CudaWireEngine>> made = CudaWireEngine::Create(
        options_.engine, events_, *std::move(joined), options_.wire.counters);
    if (!made.ok()) return made.status();
    engine = *std::move(made);
  }
  absl::StatusOr<std::unique_ptr<StreamCommunicator>> communicator = StreamCommunicator::Create(
      std::move(engine), kWireTransport, events_, rank, world_size, options_.wire.step_timeout);
  if (!communicator.ok()) return communicator.status();
  return *std::move(communicator);
}

absl::StatusOr<std::unique_ptr<TransferEngine>> CudaWireTransport::ConnectEngine(
    uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>& peers,
    absl::Time deadline) {
  absl::StatusOr<WireConnector::Joined> joined =
      connector_.Connect(generation, blobs, peers, deadline);
  if (!joined.ok()) return joined.status();
  absl::StatusOr<std::unique_ptr<CudaWireEngine>> engine =
      CudaWireEngine::Create(options_.engine, events_, *std::move(joined), options_.wire.counters);
  if (!engine.ok()) return engine.status();
  return *std::move(engine);
}

}  // namespace ringattn::worker
