// ExtentAllocator: allocates extents of one memory range. Works on offsets only.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_EXTENT_ALLOCATOR_H_
#define RINGATTN_WORKER_DEVICE_CUDA_EXTENT_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <optional>

namespace ringattn::worker {

// Best fit; adjacent free extents are merged. The few large buffers of a handful of operations
// leave few holes. Not thread safe.
class ExtentAllocator {
 public:
  // Manages [0, size). Extents begin at multiples of `alignment`, a power of two, and are rounded
  // up to it.
  ExtentAllocator(int64_t size, int64_t alignment);

  // Returns the offset of `bytes` > 0 of free memory, or nothing if no free extent is that large.
  std::optional<int64_t> Take(int64_t bytes);

  // Frees an extent. REQUIRES: `offset` came from Take and has not been freed.
  void Give(int64_t offset);

  int64_t free_bytes() const { return free_bytes_; }
  int64_t largest_free_bytes() const;

 private:
  int64_t alignment_;
  int64_t free_bytes_;
  std::map<int64_t, int64_t> free_;   // size by offset; never adjacent
  std::map<int64_t, int64_t> taken_;  // size by offset
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_EXTENT_ALLOCATOR_H_
