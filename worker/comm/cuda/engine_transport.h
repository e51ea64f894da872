// EngineTransport: a transport of GPU rings that can also move the bytes between some of a ring's
// ranks while another engine moves the rest.
#ifndef RINGATTN_WORKER_COMM_CUDA_ENGINE_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_CUDA_ENGINE_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/cuda/transfer_engine.h"

namespace ringattn::worker {

// Thread safe.
class EngineTransport : public RingTransport {
 public:
  // Phase one, for Connect or ConnectEngine. Differs from Prepare if the transport limits the size
  // of rings, because only some of the ranks may exchange by it.
  virtual absl::StatusOr<std::string> PrepareEngine(uint64_t generation, int rank,
                                                    int world_size) = 0;

  // Phase two, instead of Connect: returns an engine for transfers with `peers`, which does not
  // include this rank. Every one of them must call it with this rank among its peers. Exchanges
  // nothing yet, so a peer may still be unreachable. Blobs of other ranks may be empty. Cancel ends
  // it. Errors as for Connect.
  virtual absl::StatusOr<std::unique_ptr<TransferEngine>> ConnectEngine(
      uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>& peers,
      absl::Time deadline) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_ENGINE_TRANSPORT_H_
