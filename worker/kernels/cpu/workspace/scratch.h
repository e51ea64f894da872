// Scratch: one thread's working memory, kept between calls.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_SCRATCH_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_SCRATCH_H_

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace ringattn::worker::cpu {

// Not thread safe: each compute thread has its own.
class Scratch {
 public:
  // Makes room for `bytes` in all; grows, never shrinks. Forgets what was taken.
  void Reserve(int64_t bytes) {
    used_ = 0;
    if (bytes <= capacity_) return;
    buffer_.reset(static_cast<char*>(
        ::operator new (static_cast<size_t>(bytes), std::align_val_t{kBufferAlignment})));
    capacity_ = bytes;
  }

  // Makes everything available again.
  void Restart() { used_ = 0; }

  // The next `count` values of a trivial type, 64-byte aligned, uninitialised.
  // REQUIRES: the sum of Bytes<T>(count) since Restart is within what was reserved.
  template <typename T>
  T* Take(int64_t count) {
    T* taken = reinterpret_cast<T*>(buffer_.get() + used_);
    used_ += Bytes<T>(count);
    assert(used_ <= capacity_);
    return taken;
  }

  // What Take<T>(count) uses.
  template <typename T>
  static int64_t Bytes(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

 private:
  static constexpr size_t kBufferAlignment = 4096;
  struct Free {
    void operator()(char* p) const { ::operator delete (p, std::align_val_t{kBufferAlignment}); }
  };

  std::unique_ptr<char, Free> buffer_;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_SCRATCH_H_
