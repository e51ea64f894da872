// Device memory for kernel checks, and functions that end a check after an error.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_GUARDED_BUFFER_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_GUARDED_BUFFER_H_

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"

namespace ringattn::worker::cuda::check {

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

// Device memory with guard zones on both sides, filled with 0xFF (NaN in every
// float type).
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    Check(cudaMalloc(&base_, bytes + 2 * kGuard), "cudaMalloc");
    Check(cudaMemset(base_, 0xFF, bytes + 2 * kGuard), "cudaMemset");
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <typename T = void>
  T* get() const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + kGuard);
  }
  template <typename T>
  void Upload(const std::vector<T>& source) {
    Check(cudaMemcpy(get(), source.data(), source.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  }
  template <typename T>
  std::vector<T> Download() const {
    std::vector<T> result(bytes_ / sizeof(T));
    Check(cudaMemcpy(result.data(), get(), result.size() * sizeof(T), cudaMemcpyDeviceToHost),
          "download");
    return result;
  }
  bool GuardsIntact() const {
    std::vector<unsigned char> zone(kGuard);
    for (size_t offset : {size_t{0}, kGuard + bytes_}) {
      Check(cudaMemcpy(zone.data(), static_cast<char*>(base_) + offset, kGuard,
                       cudaMemcpyDeviceToHost),
            "guard");
      for (unsigned char byte : zone) {
        if (byte != 0xFF) return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 32768;
  size_t bytes_;
  void* base_ = nullptr;
};

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_GUARDED_BUFFER_H_
