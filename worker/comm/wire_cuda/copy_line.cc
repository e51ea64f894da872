#include "worker/comm/wire_cuda/copy_line.h"

#include <utility>

#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {

CopyLine::~CopyLine() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

absl::Status CopyLine::Open() {
  int lowest = 0, highest = 0;
  absl::Status status = CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                                   "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  return CudaStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
                    "cudaStreamCreateWithPriority");
}

void CopyLine::Start(const WireCopy& copy, cudaMemcpyKind kind) {
  const bool to_slot = kind == cudaMemcpyDeviceToHost;
  absl::Status status = CudaStatus(
      cudaMemcpyAsync(to_slot ? copy.slot : copy.device, to_slot ? copy.device : copy.slot,
                      copy.chunk.frame.length, kind, stream_),
      "cudaMemcpyAsync");
  if (status.ok()) status = flags_->Write(stream_, ended_.device, started_ + 1);
  // A copy whose end is not reported may still run, so it must end here.
  if (!status.ok()) (void)cudaStreamSynchronize(stream_);
  if (status.ok()) ++started_;
  copies_.push_back({copy, started_, std::move(status)});
}

int CopyLine::Collect(
    const std::function<void(const WireCopy& copy, const absl::Status& status)>& on_end) {
  const uint64_t ended = ended_.Load();
  int count = 0;
  for (; !copies_.empty() && copies_.front().number <= ended; ++count) {
    const Copy first = std::move(copies_.front());
    copies_.pop_front();
    on_end(first.copy, first.status);
  }
  return count;
}

bool CopyLine::busy() const {
  return stream_ != nullptr && cudaStreamQuery(stream_) == cudaErrorNotReady;
}

}  // namespace ringattn::worker
