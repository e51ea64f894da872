// ringattn::client::CudaRegion: GPU memory that it shares with the workers of this machine. Tensors
// in it are copied from GPU to GPU only.
//
//   auto region = ringattn::client::CudaRegion::Create(client.get(), /*device=*/0, 1 << 30);
//   ForwardArgs args;                // q, k, v and the results lie in (*region)->memory()
//   ... launch kernels that write q, k, v; cudaStreamSynchronize(stream) ...
//   client->Forward(args, results);  // recognises the tensors by their addresses
//
// Workers accept such memory with --local_memory=cuda_memory. A call uses CUDA memory if all its
// tensors lie in CUDA regions and all ring members have these attached. Otherwise the library
// copies the tensors through host memory and uses another transport; CallReport has the reason.
// Addresses on a GPU that lie in no CudaRegion are not supported.
//
// Ordering: the work that writes the inputs must have completed when the call starts
// (cudaStreamSynchronize), and nothing may use the inputs or results until the call has ended. Then
// the results are visible to work on any stream.
// Tests: tests/cuda_memory/cuda_memory_fake_test.cc, tests/e2e/test_cuda_memory.py.
#ifndef RINGATTN_CLIENT_API_CUDA_REGION_H_
#define RINGATTN_CLIENT_API_CUDA_REGION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/call.h"

namespace ringattn::client {

class Client;

// Thread safe, except for accesses to the memory itself.
class CudaRegion {
 public:
  // Allocates `bytes` of uninitialised memory on CUDA device `device` (this process's numbering),
  // aligned and rounded up to the GPU's pages of 2 MiB, and attaches it to all workers. Attaching
  // takes milliseconds, or seconds for tens of gigabytes. If no worker can attach it, the memory
  // works like any other on its GPU and trouble() returns the reason. The region may outlive
  // `client`.
  // Errors: FAILED_PRECONDITION without a CUDA driver (libcuda.so.1); INVALID_ARGUMENT for 0 bytes
  // or a device that does not exist; RESOURCE_EXHAUSTED without memory; INTERNAL naming the driver
  // call that failed.
  static absl::StatusOr<std::unique_ptr<CudaRegion>> Create(Client* client, int device,
                                                            int64_t bytes);

  // As Create, with memory of cudaMalloc's kind, for comparison with adopted memory. Memory of
  // Create can be mapped wherever this can, and in more places.
  static absl::StatusOr<std::unique_ptr<CudaRegion>> CreateLinear(Client* client, int device,
                                                                  int64_t bytes);

  // Shares the caller's memory [data, data + bytes) on a GPU. The caller owns it and must keep it
  // allocated until the region is destroyed. It must lie in one allocation, made by cudaMalloc or
  // by cuMemCreate with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR. A worker cannot attach cudaMalloc
  // memory if its process number equals this one's, as can happen between two containers, because
  // CUDA does not open such handles.
  // Errors: as above; INVALID_ARGUMENT with the reason for memory that no other process can map (a
  // stream-ordered pool, several allocations, host memory).
  static absl::StatusOr<std::unique_ptr<CudaRegion>> Adopt(Client* client, void* data,
                                                           int64_t bytes);

  // Detaches the region from all workers. Calls that use it end with CANCELLED, REGION_RELEASED.
  // Memory of Create is freed after they have ended. The GPU counts it as used until every worker
  // has detached it.
  ~CudaRegion();

  CudaRegion(const CudaRegion&) = delete;
  CudaRegion& operator=(const CudaRegion&) = delete;

  // GPU addresses: the host must not dereference them.
  MutableBytes memory() const;
  int device() const;

  // Copy between host memory and the region, blocking. INVALID_ARGUMENT beyond the region's end.
  absl::Status CopyIn(uint64_t offset, ConstBytes from_host) const;
  absl::Status CopyOut(uint64_t offset, MutableBytes to_host) const;

  // As Region's.
  std::vector<std::string> workers() const;
  std::string trouble() const;

 private:
  struct Impl;
  explicit CudaRegion(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_CUDA_REGION_H_
