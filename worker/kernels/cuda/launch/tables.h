// The layout of a prepared kernel's tables, the same in host and device memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TABLES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TABLES_H_

#include <cstdint>
#include <cstring>
#include <vector>

namespace ringattn::worker::cuda {

inline constexpr int64_t kTableAlignment = 256;

inline int64_t AlignUp(int64_t bytes) {
  return (bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
}

template <typename T>
int64_t TableBytes(const std::vector<T>& table) {
  return AlignUp(static_cast<int64_t>(table.size() * sizeof(T)));
}

template <typename T>
void WriteTable(const std::vector<T>& table, void* tables, int64_t offset) {
  if (table.empty()) return;
  std::memcpy(static_cast<char*>(tables) + offset, table.data(), table.size() * sizeof(T));
}

template <typename T>
const T* TableAt(const void* tables, int64_t offset) {
  return reinterpret_cast<const T*>(static_cast<const char*>(tables) + offset);
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TABLES_H_
