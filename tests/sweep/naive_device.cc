#include "tests/sweep/naive_device.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "worker/device/host_call.h"
#include "worker/kernels/naive/naive_kernels.h"

namespace ringattn::tests {
namespace {

class PoisonedBuffer : public DeviceBuffer {
 public:
  explicit PoisonedBuffer(int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(data_, 0xff, bytes);
  }
  ~PoisonedBuffer() override { std::free(data_); }

  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* data_ = nullptr;
  const int64_t bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceBuffer>> NaiveDevice::Allocate(int64_t bytes) {
  return std::make_unique<PoisonedBuffer>(bytes);
}

absl::StatusOr<PreparedCalls> NaiveDevice::Prepare(std::vector<KernelCall> calls) {
  return PrepareHostCalls(
      std::move(calls), [](DType) { return KernelName{.family = "naive"}; },
      [this](const KernelCall& call, std::vector<EventRef> after, RunControl* control) {
        return queue_.Start(
            [&call, control]() -> absl::Status {
              if (!control->stop) RunNaively(call);
              return absl::OkStatus();
            },
            std::move(after), HostQueue::OnFailure::kSkip);
      });
}

absl::Status NaiveDevice::CopyFromHost(void* device, const void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
  return absl::OkStatus();
}

absl::Status NaiveDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
  return absl::OkStatus();
}

}  // namespace ringattn::tests
