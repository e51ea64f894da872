#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "worker/comm/cuda/test_ranks.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/device/cuda/extent_allocator.h"

namespace ringattn::worker {
namespace {

// One region per device, which all ranks on it send from.
class Heap {
 public:
  static Heap& Of(int device) {
    static auto* heaps = new std::map<int, Heap>();
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    return heaps->try_emplace(device, device).first->second;
  }

  explicit Heap(int device) {
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

}  // namespace

absl::StatusOr<std::unique_ptr<RingTransport>> MakeTestTransport(const TestRankOptions& options) {
  Heap* heap = &Heap::Of(options.device);
  PeerTransportOptions peer;
  peer.cuda_index = options.device;
  peer.regions = [heap] { return std::vector<DeviceRegion>{heap->region()}; };
  peer.allocate = [heap](int64_t bytes) -> absl::StatusOr<std::unique_ptr<DeviceBuffer>> {
    return std::make_unique<HeapBuffer>(heap, bytes);
  };
  peer.step_timeout = options.step_timeout;
  peer.on_stuck = options.on_stuck;
  return PeerRingTransport::Create(std::move(peer));
}

std::vector<int> TestCtas() { return {0}; }

void* TestAllocate(int device, int64_t bytes) { return Heap::Of(device).Take(bytes); }
void TestFree(int device, void* data) { Heap::Of(device).Give(data); }

}  // namespace ringattn::worker
