#include "worker/comm/peer/peer_ranks.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "gtest/gtest.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/device/cuda/extent_allocator.h"

namespace ringattn::worker {
namespace {

// One region of each kind per device, from which all ranks on the device send.
class Heap {
 public:
  static Heap& Of(int device, RegionSharing sharing) {
    static auto* heaps = new std::map<std::pair<int, RegionSharing>, Heap>();
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    return heaps->try_emplace({device, sharing}, device, sharing).first->second;
  }

  Heap(int device, RegionSharing sharing) {
    if (sharing == RegionSharing::kVmm) {
      const auto events = CudaEventPool::ForDevice(device);
      const auto driver = CudaDriver::Load();
      EXPECT_TRUE(events.ok() && driver.ok());
      auto made = VmmRegion::Create(*events, *driver, kBytes);
      EXPECT_TRUE(made.ok()) << made.status();
      vmm_ = *std::move(made);
      region_ = {vmm_->data(), kBytes, vmm_->descriptor()};
      return;
    }
    void* base = nullptr;
    if (cudaSetDevice(device) != cudaSuccess || cudaMalloc(&base, kBytes) != cudaSuccess) return;
    region_ = {static_cast<char*>(base), kBytes};
  }
  Heap(Heap&&) = delete;

  DeviceRegion region() const { return region_; }
  void* Take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto offset = extents_.Take(bytes);
    return offset.has_value() ? region_.base + *offset : nullptr;
  }
  void Give(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    extents_.Give(static_cast<char*>(data) - region_.base);
  }

 private:
  static constexpr int64_t kBytes = int64_t{2} << 30;

  DeviceRegion region_;
  std::unique_ptr<VmmRegion> vmm_;
  std::mutex mutex_;
  ExtentAllocator extents_{kBytes, 256};
};

class HeapBuffer : public DeviceBuffer {
 public:
  HeapBuffer(Heap* heap, int64_t bytes) : heap_(heap), data_(heap->Take(bytes)), bytes_(bytes) {}
  ~HeapBuffer() override { heap_->Give(data_); }
  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  Heap* const heap_;
  void* const data_;
  const int64_t bytes_;
};

// A rank whose memory comes from the region, so that peers can map it.
class PeerRank : public GpuRank {
 public:
  PeerRank(int device, RegionSharing sharing, std::unique_ptr<RingTransport> transport)
      : GpuRank(device, std::move(transport)), heap_(&Heap::Of(device, sharing)) {}

 protected:
  void* TakeMemory(int64_t bytes) override { return heap_->Take(bytes); }
  void GiveMemory(void* data) override { heap_->Give(data); }

 private:
  Heap* const heap_;
};

}  // namespace

PeerTransportOptions TestPeerOptions(int device, RegionSharing sharing,
                                     const TestRankOptions& options) {
  Heap* heap = &Heap::Of(device, sharing);
  PeerTransportOptions peer;
  peer.cuda_index = device;
  peer.regions = [heap] { return std::vector<DeviceRegion>{heap->region()}; };
  peer.allocate = [heap](int64_t bytes) -> absl::StatusOr<std::unique_ptr<DeviceBuffer>> {
    return std::make_unique<HeapBuffer>(heap, bytes);
  };
  peer.step_timeout = options.step_timeout;
  peer.on_stuck = options.on_stuck;
  return peer;
}

std::unique_ptr<TestRank> MakePeerRank(int device, RegionSharing sharing,
                                       std::unique_ptr<RingTransport> transport) {
  return std::make_unique<PeerRank>(device, sharing, std::move(transport));
}

}  // namespace ringattn::worker
