// A case whose input lies in host memory, from where the launches fetch it, and whose results are
// written to host memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_FETCHED_STEP_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_FETCHED_STEP_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "worker/kernels/cuda/paged/check/device_buffer.h"
#include "worker/kernels/cuda/paged/check/paged_case.h"

namespace ringattn::worker::cuda::paged::check {

// Pinned host memory that grows on demand. Thread compatible.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  // `bytes` of memory, all bytes `fill`.
  void Reset(int64_t bytes, int fill);
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

// Thread compatible.
class FetchedStep {
 public:
  // Whether the case's input is small enough to be fetched.
  bool Lay(const PagedCase& c);

  // Checks that the results of such launches have the bits of `out` and `lse` once the launch has
  // signalled its end, or once the stream is idle if it never signals. `before` sets the cache as
  // it is before the append, and `after` returns whether it is as expected after it. `plain` has
  // the case's cache and workspace. Returns what is wrong, or an empty text. Sets *signals.
  std::string Run(const PagedCase& c, const Buffers& plain, const DeviceInfo& device,
                  KernelChoice choice, cudaStream_t stream, const std::vector<char>& out,
                  const std::vector<float>& lse, const std::function<void()>& before,
                  const std::function<bool()>& after, bool* signals);

 private:
  Buffers BuffersOf(const PagedCase& c, const Buffers& plain) const;
  void WriteStep(const PagedCase& c, uint32_t number, bool with_rows);
  // Waits for the launch with this number.
  std::string Await(uint32_t number, bool signals, cudaStream_t stream) const;

  int64_t rows_ = 0, tables_ = 0, q_ = 0, k_ = 0, v_ = 0, sinks_ = 0, bytes_ = 0;
  PinnedBuffer input_, out_, lse_, done_;
  DeviceBuffer target_;
};

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_FETCHED_STEP_H_
