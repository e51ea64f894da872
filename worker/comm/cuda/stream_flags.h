// StreamFlags: 64-bit words in host memory that CUDA streams write and wait for. They order streams
// of different processes without a host thread.
#ifndef RINGATTN_WORKER_COMM_CUDA_STREAM_FLAGS_H_
#define RINGATTN_WORKER_COMM_CUDA_STREAM_FLAGS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

// The driver's stream memory operations. Thread safe.
class StreamFlags {
 public:
  // Returns FAILED_PRECONDITION if the driver does not have them. Lives as long as the process.
  static absl::StatusOr<const StreamFlags*> Load();

  // Writes `value` on the stream. `flag`: the device address of a word (cudaHostGetDevicePointer).
  // The write follows all earlier work on the stream and makes it visible to other devices.
  absl::Status Write(cudaStream_t stream, uint64_t* flag, uint64_t value) const;
  // Makes the stream wait until the word is between `value` and value + 2^63 - 1.
  absl::Status WaitAtLeast(cudaStream_t stream, uint64_t* flag, uint64_t value) const;

 private:
  using Operation = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

  StreamFlags() = default;
  absl::Status Init();

  Operation write_ = nullptr;
  Operation wait_ = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_STREAM_FLAGS_H_
