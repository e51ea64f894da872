// Tiles of 16-bit elements in shared memory, permuted so that ldmatrix has no bank conflicts.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SHARED_TILE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SHARED_TILE_CUH_

#include <cstdint>

namespace ringattn::worker::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A tile of 16-bit elements, row-major, kColumns per row, whose 16-byte chunks
// are permuted inside each row so that the eight rows of one ldmatrix fall into
// eight different bank groups.
template <int kColumns>
struct SharedTile {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kRowBytes = kColumns * 2;
  // Rows are multiples of 128 bytes: permute over eight chunks by row mod 8.
  // Otherwise (32, 96 columns) two rows are: over four chunks by row/2 mod 4.
  static constexpr bool kWide = kChunks % 8 == 0;
  static_assert(kWide || kChunks % 4 == 0, "no conflict-free permutation for this width");

  static __device__ __forceinline__ uint32_t Permute(int row, int chunk) {
    return kWide ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }
  static __device__ __forceinline__ uint32_t Offset(int row, int chunk) {
    return row * kRowBytes + Permute(row, chunk) * 16;
  }

  // The address of chunk `chunk` + 2 * step in the row of base = Offset(row,
  // chunk), where 2 * step has no bit in common with `chunk`: the permutation
  // touches low bits only, so a step is an exclusive or plus a constant. `step`
  // is known at compile time once the caller's loop is unrolled.
  static __device__ __forceinline__ uint32_t Step(uint32_t base, int step) {
    constexpr int kMask = kWide ? 127 : 63;
    return (base ^ ((step * 32) & kMask)) + ((step * 32) & ~kMask);
  }
};

__device__ __forceinline__ float LoadShared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SHARED_TILE_CUH_
