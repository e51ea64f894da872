// ExtentAllocator: which parts of one range of memory are taken. Knows offsets only.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_EXTENT_ALLOCATOR_H_
#define RINGATTN_WORKER_DEVICE_CUDA_EXTENT_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <optional>

namespace ringattn::worker {

// Best fit, and neighbours that are free grow together again: the few large buffers of a
// handful of operations leave few holes. Not thread safe.
class ExtentAllocator {
 public:
  // The range [0, size). Every extent begins, and is rounded up to, a multiple of
  // `alignment`, a power of two.
  ExtentAllocator(int64_t size, int64_t alignment);

  // The offset of `bytes` > 0 that are free; nothing if no free extent is that large.
  std::optional<int64_t> Take(int64_t bytes);

  // Frees what Take gave. REQUIRES: an offset that Take returned and nobody gave back.
  void Give(int64_t offset);

  int64_t free_bytes() const { return free_bytes_; }
  int64_t largest_free_bytes() const;

 private:
  int64_t alignment_;
  int64_t free_bytes_;
  std::map<int64_t, int64_t> free_;   // size by offset; no two touch
  std::map<int64_t, int64_t> taken_;  // size by offset
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_EXTENT_ALLOCATOR_H_
