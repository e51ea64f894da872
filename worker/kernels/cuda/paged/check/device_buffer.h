// Device memory of the check and the bench, and what ends a program that cannot go on.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_DEVICE_BUFFER_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_DEVICE_BUFFER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"

namespace ringattn::worker::cuda::paged::check {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "FATAL %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "FATAL %s\n", status.ToString().c_str());
  std::exit(2);
}

// Device memory that grows on demand, between guard zones of 0xFF (NaN in every float type).
// Thread compatible.
class DeviceBuffer {
 public:
  static constexpr size_t kGuard = 4096;

  DeviceBuffer() = default;
  ~DeviceBuffer() { cudaFree(base_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // `bytes` of memory, all bytes `fill`, with fresh guards. Waits for the device.
  void Reset(size_t bytes, int fill) {
    Reserve(bytes);
    Check(cudaMemset(base_, 0xFF, kGuard), "guard");
    Check(cudaMemset(get<char>(), fill, bytes), "fill");
    Check(cudaMemset(get<char>() + bytes, 0xFF, kGuard), "guard");
  }
  // The same without any fill or guard.
  void Reserve(size_t bytes) {
    bytes_ = bytes;
    if (bytes + 2 * kGuard <= capacity_) return;
    Check(cudaFree(base_), "cudaFree");
    base_ = nullptr;
    capacity_ = bytes + 2 * kGuard;
    Check(cudaMalloc(&base_, capacity_), "cudaMalloc");
  }
  template <typename T>
  T* get() const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + kGuard);
  }
  template <typename T>
  void Upload(const std::vector<T>& source) {
    if (source.empty()) return;
    Check(cudaMemcpy(get<T>(), source.data(), source.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  }
  template <typename T>
  std::vector<T> Download() const {
    std::vector<T> result(bytes_ / sizeof(T));
    if (result.empty()) return result;
    Check(cudaMemcpy(result.data(), get<T>(), result.size() * sizeof(T), cudaMemcpyDeviceToHost),
          "download");
    return result;
  }
  bool GuardsIntact() const {
    std::vector<unsigned char> zone(kGuard);
    for (const size_t offset : {size_t{0}, kGuard + bytes_}) {
      Check(cudaMemcpy(zone.data(), static_cast<char*>(base_) + offset, kGuard,
                       cudaMemcpyDeviceToHost),
            "guard");
      for (const unsigned char byte : zone) {
        if (byte != 0xFF) return false;
      }
    }
    return true;
  }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
  size_t capacity_ = 0;
};

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_DEVICE_BUFFER_H_
