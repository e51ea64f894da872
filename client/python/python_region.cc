#include "client/python/python_region.h"

#include <unistd.h>

#include <utility>

#include "client/memory/cuda_device.h"
#include "client/python/gil_released.h"

namespace ringattn::python {

absl::StatusOr<std::shared_ptr<PythonRegion>> PythonRegion::Allocate(ClientHandle& client,
                                                                     int64_t bytes) {
  auto region = [&] {
    const GilReleased released;
    return client::Region::Allocate(&client.get(), bytes);
  }();
  if (!region.ok()) return region.status();
  return std::shared_ptr<PythonRegion>(new PythonRegion(*std::move(region)));
}

PythonRegion::PythonRegion(std::unique_ptr<client::Region> region)
    : region_(std::move(region)),
      mapping_(region_->mapping()),
      address_(reinterpret_cast<uint64_t>(region_->memory().data())),
      bytes_(static_cast<int64_t>(region_->memory().size())),
      process_(getpid()) {}

PythonRegion::~PythonRegion() {
  if (getpid() == process_) {
    Close();
    return;
  }
  static_cast<void>(region_.release());
  // NOLINTNEXTLINE: leaked, as unmapping and joining are the parent's
  static_cast<void>(new std::shared_ptr<const void>(std::move(mapping_)));
}

std::vector<std::string> PythonRegion::workers() const {
  return region_ == nullptr ? std::vector<std::string>() : region_->workers();
}

std::string PythonRegion::trouble() const {
  return region_ == nullptr ? "the region is closed" : region_->trouble();
}

void PythonRegion::Close() {
  if (region_ == nullptr || getpid() != process_) return;
  std::unique_ptr<client::Region> region = std::move(region_);
  const GilReleased released;
  region.reset();
}

absl::StatusOr<std::shared_ptr<PythonCudaRegion>> PythonCudaRegion::Allocate(ClientHandle& client,
                                                                             int device,
                                                                             int64_t bytes) {
  auto region = [&] {
    const GilReleased released;
    return client::CudaRegion::Create(&client.get(), device, bytes);
  }();
  if (!region.ok()) return region.status();
  return std::shared_ptr<PythonCudaRegion>(new PythonCudaRegion(*std::move(region)));
}

PythonCudaRegion::PythonCudaRegion(std::unique_ptr<client::CudaRegion> region)
    : region_(std::move(region)), process_(getpid()) {}

PythonCudaRegion::~PythonCudaRegion() {
  if (getpid() != process_) {
    static_cast<void>(region_.release());
    return;
  }
  const GilReleased released;
  // Kernels that read this memory may still be running.
  const auto device = client::CudaDevice::Get(region_->device());
  if (device.ok()) static_cast<void>((*device)->Synchronize());
  region_.reset();
}

}  // namespace ringattn::python
