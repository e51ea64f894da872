#include "worker/device/cuda/cuda_imports.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/device/cuda/cuda_status.h"
#include "worker/device/cuda/vmm_memory.h"

namespace ringattn::worker {
namespace {

// The limit of cudaMemcpy2DAsync for distances between rows (cudaDeviceProp::memPitch) is at least
// this.
constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;

absl::Status OutOfReach(const std::string& why) { return absl::FailedPreconditionError(why); }

std::string UuidOf(const cudaDeviceProp& properties) {
  return {properties.uuid.bytes, sizeof(properties.uuid.bytes)};
}

class IpcMapping final : public ImportedMemory {
 public:
  IpcMapping(CudaEventPool* events, void* data) : events_(events), data_(data) {}
  ~IpcMapping() override {
    if (events_->UseDevice().ok()) (void)cudaIpcCloseMemHandle(data_);
  }
  uint8_t* data() const override { return static_cast<uint8_t*>(data_); }

 private:
  CudaEventPool* const events_;
  void* const data_;
};

// Returns how many pieces from `first` on are rows of one rectangle: equal lengths at equal
// distances on both sides.
size_t RowsFrom(absl::Span<const DeviceCopy> pieces, size_t first, int64_t* to_pitch,
                int64_t* from_pitch) {
  const auto distance = [](const void* from, const void* to) {
    return static_cast<const char*>(to) - static_cast<const char*>(from);
  };
  size_t rows = 1;
  for (size_t next = first + 1; next < pieces.size(); ++next, ++rows) {
    const DeviceCopy &last = pieces[next - 1], &piece = pieces[next];
    const int64_t to = distance(last.to, piece.to), from = distance(last.from, piece.from);
    if (rows == 1) {
      *to_pitch = to;
      *from_pitch = from;
    }
    const bool fits = piece.bytes == last.bytes && to == *to_pitch && from == *from_pitch &&
                      to >= piece.bytes && from >= piece.bytes && to <= kMaxPitch &&
                      from <= kMaxPitch;
    if (!fits) break;
  }
  return rows;
}

absl::Status Enqueue(absl::Span<const DeviceCopy> pieces, cudaStream_t stream) {
  for (size_t i = 0; i < pieces.size();) {
    const DeviceCopy& piece = pieces[i];
    int64_t to_pitch = 0, from_pitch = 0;
    const size_t rows = RowsFrom(pieces, i, &to_pitch, &from_pitch);
    const absl::Status status =
        rows == 1
            ? CudaStatus(cudaMemcpyAsync(piece.to, piece.from, piece.bytes,
                                         cudaMemcpyDeviceToDevice, stream),
                         "cudaMemcpyAsync")
            : CudaStatus(cudaMemcpy2DAsync(piece.to, to_pitch, piece.from, from_pitch, piece.bytes,
                                           rows, cudaMemcpyDeviceToDevice, stream),
                         "cudaMemcpy2DAsync");
    if (!status.ok()) return status;
    i += rows;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaImports>> CudaImports::Create(CudaEventPool* events) {
  absl::Status status = events->UseDevice();
  if (!status.ok()) return status;
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  std::unique_ptr<CudaImports> imports(new CudaImports(events, *driver));
  for (cudaStream_t* stream : {&imports->in_, &imports->out_}) {
    status = CudaStatus(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
    if (!status.ok()) return status;
  }
  return imports;
}

CudaImports::~CudaImports() {
  if (!events_->UseDevice().ok()) return;
  for (cudaStream_t stream : {in_, out_}) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
}

absl::StatusOr<int> CudaImports::FindReachable(const std::string& uuid) const {
  int count = 0;
  absl::Status status = CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!status.ok()) return status;
  for (int gpu = 0; gpu < count; ++gpu) {
    cudaDeviceProp properties;
    status = CudaStatus(cudaGetDeviceProperties(&properties, gpu), "cudaGetDeviceProperties");
    if (!status.ok()) return status;
    if (UuidOf(properties) != uuid) continue;
    if (gpu == events_->device()) return gpu;
    int can = 0;
    status = CudaStatus(cudaDeviceCanAccessPeer(&can, events_->device(), gpu),
                        "cudaDeviceCanAccessPeer");
    if (!status.ok()) return status;
    if (can == 0) {
      return OutOfReach("this worker's GPU has no peer access to the memory's GPU");
    }
    return gpu;
  }
  return OutOfReach(
      "this worker does not see the GPU of the memory (CUDA_VISIBLE_DEVICES, or the container's "
      "devices)");
}

absl::StatusOr<std::unique_ptr<ImportedMemory>> CudaImports::Import(
    const SharedAllocation& allocation) {
  if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
  if (allocation.bytes < 1) return absl::InvalidArgumentError("the allocation has no bytes");
  const absl::StatusOr<int> gpu = FindReachable(allocation.device_uuid);
  if (!gpu.ok()) return gpu.status();
  if (allocation.descriptor >= 0) return ImportVmm(allocation, *gpu);
  return ImportIpc(allocation);
}

absl::StatusOr<std::unique_ptr<ImportedMemory>> CudaImports::ImportVmm(
    const SharedAllocation& allocation, int gpu) {
  return VmmMapping::Map(events_, &driver_, allocation.descriptor, allocation.bytes, gpu);
}

absl::StatusOr<std::unique_ptr<ImportedMemory>> CudaImports::ImportIpc(
    const SharedAllocation& allocation) {
  cudaIpcMemHandle_t handle;
  if (allocation.ipc_handle.size() != sizeof(handle)) {
    return absl::InvalidArgumentError("the handle does not refer to CUDA memory");
  }
  // CUDA mistakes an importer with the exporter's process id for the exporter and fails with a
  // misleading error. In containers most processes have id 1.
  if (allocation.exporter_pid == static_cast<uint32_t>(getpid())) {
    return absl::InvalidArgumentError(
        absl::StrCat("client and worker both have process id ", allocation.exporter_pid,
                     " (in different PID namespaces), with which CUDA cannot open handles of "
                     "cudaMalloc; use memory of cuMemCreate instead"));
  }
  std::memcpy(&handle, allocation.ipc_handle.data(), sizeof(handle));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::InvalidArgumentError(absl::StrCat(
        "cudaIpcOpenMemHandle: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
  }
  auto mapping = std::make_unique<IpcMapping>(events_, data);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult result = driver_.address_range(&base, &bytes, reinterpret_cast<CUdeviceptr>(data));
  if (result != CUDA_SUCCESS) {
    return absl::ResourceExhaustedError(driver_.What("cuMemGetAddressRange", result));
  }
  // Small allocations are part of a larger driver block, all of which is mapped.
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  const auto stated = static_cast<size_t>(allocation.bytes);
  if (address < base || stated > bytes || address - base > bytes - stated) {
    return absl::InvalidArgumentError(
        absl::StrCat("the allocation does not have the ", stated, " bytes that the client stated"));
  }
  return mapping;
}

absl::StatusOr<EventRef> CudaImports::Copy(absl::Span<const DeviceCopy> pieces,
                                           ImportedCopy direction) {
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  const bool in = direction == ImportedCopy::kIn;
  cudaStream_t stream = in ? in_ : out_;
  absl::MutexLock lock(in ? &in_mutex_ : &out_mutex_);
  auto event = std::make_shared<CudaEvent>(events_, nullptr, 0);
  status = event->RecordBegin(stream);
  if (!status.ok()) return status;
  const absl::Status copied = Enqueue(pieces, stream);
  status = event->RecordEnd(stream);
  if (!status.ok()) {
    // Copies are in flight and nothing reports their end, so the context is unusable.
    events_->ReportBroken(status);
    return status;
  }
  // Earlier copies are in flight, and the memory must not be unmapped under them.
  if (!copied.ok()) {
    (void)event->Wait(absl::InfiniteFuture());
    return copied;
  }
  return event;
}

}  // namespace ringattn::worker
