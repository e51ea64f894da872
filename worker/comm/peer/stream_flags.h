// StreamFlags: 64-bit words in memory of the host that a CUDA stream writes and waits for.
// Streams of different processes order their work by them, without a host thread.
#ifndef RINGATTN_WORKER_COMM_PEER_STREAM_FLAGS_H_
#define RINGATTN_WORKER_COMM_PEER_STREAM_FLAGS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

// The driver's stream memory operations. Thread safe.
class StreamFlags {
 public:
  // FAILED_PRECONDITION if the driver does not have them. Lives as long as the process.
  static absl::StatusOr<const StreamFlags*> Load();

  // `flag`: the device's address of a word (cudaHostGetDevicePointer). The write comes
  // after everything before it on the stream and makes that visible to other devices.
  absl::Status Write(cudaStream_t stream, uint64_t* flag, uint64_t value) const;
  // The stream waits until the word is `value` or up to 2^63 - 1 more.
  absl::Status WaitAtLeast(cudaStream_t stream, uint64_t* flag, uint64_t value) const;

 private:
  using Operation = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

  StreamFlags() = default;
  absl::Status Init();

  Operation write_ = nullptr;
  Operation wait_ = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_STREAM_FLAGS_H_
