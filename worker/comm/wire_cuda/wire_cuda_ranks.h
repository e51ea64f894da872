// Ranks of GPU rings over sockets, for test programs.
#ifndef RINGATTN_WORKER_COMM_WIRE_CUDA_WIRE_CUDA_RANKS_H_
#define RINGATTN_WORKER_COMM_WIRE_CUDA_WIRE_CUDA_RANKS_H_

#include <memory>
#include <optional>

#include "common/security/tls_material.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/wire_cuda/cuda_wire_transport.h"

namespace ringattn::worker {

// Returns certificates of a new authority, which all ranks may share.
TlsMaterial TestTlsMaterial();

// Returns options of a transport whose blobs name loopback. `tls`: nullopt: plain text.
CudaWireTransportOptions TestWireOptions(int device, int connections,
                                         std::optional<TlsMaterial> tls,
                                         const TestRankOptions& options);

// Returns a ring of one GPU per rank over sockets only.
RingUnderTest WireCudaRing(const std::string& name, int connections, bool tls, int slots = 32);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_CUDA_WIRE_CUDA_RANKS_H_
