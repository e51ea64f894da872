// ringattn::client::CudaRegion: memory on a GPU that the workers of this machine read and write
// themselves, so that tensors in it travel from GPU to GPU and nowhere else.
//
//   auto region = ringattn::client::CudaRegion::Create(client.get(), /*device=*/0, 1 << 30);
//   ForwardArgs args;                       // q, k, v and the results lie in (*region)->memory()
//   ... launch what writes q, k, v; cudaStreamSynchronize(stream) ...
//   client->Forward(args, results);         // finds them there by their addresses
//
// Workers take it with --local_memory=cuda_memory. Where all tensors of a call lie in such regions
// and all members of the ring have them, the call is CUDA_MEMORY (CallReport::accepted). Else the
// library copies them through host memory and the call takes another way; the report says which and
// why. Tensors on a GPU that lie in no CudaRegion are not taken: their addresses mean nothing here.
//
// Order: the caller's streams have done what writes the inputs when the call begins
// (cudaStreamSynchronize), and nothing uses them or the results before it has ended. From then on
// the results are there for work on any stream.
#ifndef RINGATTN_CLIENT_API_CUDA_REGION_H_
#define RINGATTN_CLIENT_API_CUDA_REGION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/api/client.h"
#include "client/memory/region_index.h"
#include "client/memory/shared_region.h"

namespace ringattn::client {

// Thread safe, but for what the caller does with the memory itself.
class CudaRegion {
 public:
  // `bytes` of memory on CUDA device `device` (as this process counts them), uninitialised, aligned
  // and rounded up to the GPU's pages of 2 MiB; shown to all workers before it returns, which takes
  // milliseconds, seconds for tens of gigabytes. Where no worker takes it it is memory like any
  // other of its GPU: trouble() says why. `client` may go first.
  // Errors: FAILED_PRECONDITION without a CUDA driver (libcuda.so.1); INVALID_ARGUMENT if there is
  // no such device, or for 0 bytes; RESOURCE_EXHAUSTED without memory; INTERNAL naming a call of
  // the driver.
  static absl::StatusOr<std::unique_ptr<CudaRegion>> Create(Client* client, int device,
                                                            int64_t bytes);

  // The same of cudaMalloc's kind, as Adopt takes it from callers: for comparison, since Create's
  // is mapped wherever this is and in more places.
  static absl::StatusOr<std::unique_ptr<CudaRegion>> CreateLinear(Client* client, int device,
                                                                  int64_t bytes);

  // Of the caller's memory, [data, data + bytes) on a GPU, which stays the caller's and has to stay
  // allocated until the region is gone. It has to lie in one allocation, either of cuMemCreate with
  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR or of cudaMalloc. Of the latter a worker takes none
  // whose process number equals this one's, as in two containers that each have number 1: CUDA does
  // not open such handles.
  // Errors: as above; INVALID_ARGUMENT, saying why, for memory that no other process can map (of a
  // stream's pool, of several allocations, not of a GPU).
  static absl::StatusOr<std::unique_ptr<CudaRegion>> Adopt(Client* client, void* data,
                                                           int64_t bytes);

  // Workers let go of it; calls that use it end with CANCELLED, REGION_RELEASED. What was created
  // is freed when they have ended; until a worker has let go of it, its GPU counts it as used.
  ~CudaRegion();

  CudaRegion(const CudaRegion&) = delete;
  CudaRegion& operator=(const CudaRegion&) = delete;

  // Addresses on the GPU: for kernels and copies, not for the host.
  MutableBytes memory() const { return {shared_->data(), static_cast<size_t>(shared_->bytes())}; }
  int device() const { return shared_->cuda()->device(); }

  // Copies between the host and bytes of the region; blocking. INVALID_ARGUMENT beyond its end.
  absl::Status CopyIn(uint64_t offset, ConstBytes from_host) const;
  absl::Status CopyOut(uint64_t offset, MutableBytes to_host) const;

  // As Region's.
  std::vector<std::string> workers() const { return shared_->workers(); }
  std::string trouble() const { return shared_->trouble(); }

 private:
  CudaRegion(std::shared_ptr<SharedRegion> shared, std::shared_ptr<RegionIndex> index)
      : shared_(std::move(shared)), index_(std::move(index)) {}
  static absl::StatusOr<std::unique_ptr<CudaRegion>> Share(
      Client* client, absl::StatusOr<std::shared_ptr<const CudaMemory>> memory);
  absl::Status CheckInside(uint64_t offset, size_t bytes) const;

  const std::shared_ptr<SharedRegion> shared_;
  const std::shared_ptr<RegionIndex> index_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_CUDA_REGION_H_
