// cuda_kernels.h on the CPU kernels and the fake runtime's streams: what CudaDevice
// makes of calls is tested where there is no GPU. A call's "table" is a number that has
// to arrive in device memory before the call runs.
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "worker/comm/nccl/fake/fake_cuda.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda {
namespace {

constexpr int64_t kTableBytes = 256;

// Calls by number; a test has few.
std::mutex mutex;
std::vector<KernelCall>& Calls() {
  static auto* calls = new std::vector<KernelCall>();
  return *calls;
}

int64_t Keep(KernelCall call) {
  const std::lock_guard<std::mutex> lock(mutex);
  Calls().push_back(std::move(call));
  return static_cast<int64_t>(Calls().size());
}

void Compute(const KernelCall& call) {
  static auto* kernels = new CpuKernels(/*threads=*/1);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> progress{0};
  if (!kernels->Run(call, stop, &progress).ok()) std::abort();
}

absl::Status Enqueue(KernelCall call, cudaStream_t stream) {
  FakeCudaEnqueue(stream, [call = std::move(call)] { Compute(call); });
  return absl::OkStatus();
}

absl::Status LaunchNumber(int64_t number, const TableLaunch& launch) {
  FakeCudaEnqueue(launch.stream, [number, launch] {
    int64_t table = 0;
    std::memcpy(&table, launch.tables, sizeof(table));
    if (table != number) std::abort();
    if (*const_cast<const volatile uint32_t*>(launch.stop_word) != 0) return;
    KernelCall call = DeltaCall{};
    {
      const std::lock_guard<std::mutex> lock(mutex);
      call = Calls()[number - 1];
    }
    Compute(call);
  });
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DeviceInfo> QueryDevice(int) { return DeviceInfo{132, 9, 227 << 10}; }

absl::Status LoadKernels() { return absl::OkStatus(); }

absl::StatusOr<PreparedForward> PrepareForward(const ForwardCall& call, const DeviceInfo&,
                                               const ForwardTuning&) {
  PreparedForward prepared;
  prepared.tile_count_ = Keep(call);
  prepared.table_bytes_ = kTableBytes;
  prepared.scratch_bytes_ = call.q_rows < 16 ? int64_t{1} << 20 : 0;
  return prepared;
}

void PreparedForward::WriteTables(void* target) const {
  std::memcpy(target, &tile_count_, sizeof(tile_count_));
}

absl::Status PreparedForward::Launch(const TableLaunch& launch) const {
  return LaunchNumber(tile_count_, launch);
}

absl::StatusOr<PreparedBackward> PrepareBackward(const BackwardCall& call, const DeviceInfo&) {
  PreparedBackward prepared;
  prepared.tile_count_ = Keep(call);
  prepared.table_bytes_ = kTableBytes;
  return prepared;
}

void PreparedBackward::WriteTables(void* target) const {
  std::memcpy(target, &tile_count_, sizeof(tile_count_));
}

absl::Status PreparedBackward::Launch(const TableLaunch& launch) const {
  return LaunchNumber(tile_count_, launch);
}

absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream) {
  return Enqueue(call, stream);
}
absl::Status StartZero(const ZeroCall& call, cudaStream_t stream) { return Enqueue(call, stream); }
absl::Status StartAdd(const AddCall& call, cudaStream_t stream) { return Enqueue(call, stream); }
absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream) {
  return Enqueue(call, stream);
}

}  // namespace ringattn::worker::cuda
