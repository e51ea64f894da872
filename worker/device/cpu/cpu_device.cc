#include "worker/device/cpu/cpu_device.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Anonymous pages: returned to the system at once on release, and untouched pages
// cost nothing, so a worker's resident size is what requests really use.
class HostBuffer : public DeviceBuffer {
 public:
  HostBuffer(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  ~HostBuffer() override {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* const data_;
  const int64_t bytes_;
};

}  // namespace

CpuDevice::CpuDevice(int threads)
    : threads_(threads), kernels_(threads), queue_("cpu_device") {}

absl::StatusOr<std::unique_ptr<DeviceBuffer>> CpuDevice::Allocate(int64_t bytes) {
  if (bytes == 0) return std::make_unique<HostBuffer>(nullptr, 0);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes of host memory"));
  }
  return std::make_unique<HostBuffer>(data, bytes);
}

EventRef CpuDevice::Start(const PreparedCall& call, std::vector<EventRef> after,
                          RunControl* control) {
  return queue_.Start(
      [this, &call, control]() -> absl::Status {
        if (control->stop.load(std::memory_order_relaxed)) return absl::OkStatus();
        absl::Status status = kernels_.Run(call.call(), control->stop, &control->progress);
        // A stopped call counts as done: what follows is stopped too, and the
        // executor reports the cancellation once.
        if (absl::IsCancelled(status)) return absl::OkStatus();
        return status;
      },
      std::move(after), HostQueue::OnFailure::kSkip);
}

absl::Status CpuDevice::CopyFromHost(void* device, const void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
  return absl::OkStatus();
}

absl::Status CpuDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
  return absl::OkStatus();
}

std::string CpuDevice::description() const {
  return absl::StrCat("cpu (", threads_, " threads)");
}

}  // namespace ringattn
