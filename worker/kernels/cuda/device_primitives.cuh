// Device-side building blocks of the kernels: asynchronous copies, shared-memory
// tile addressing, tensor-core fragments, reductions. sm_80 and later.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_DEVICE_PRIMITIVES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_DEVICE_PRIMITIVES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "worker/kernels/cuda/attention_params.h"

namespace ringattn::worker::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh to about 2e-7 of its value below 0.2, where 1 - 2 / (1 + exp 2x) would
// cancel, and 2e-7 absolute above. tanh.approx (2^-11) would move lse by up to
// 1e-2 at a cap of 30.
__device__ __forceinline__ float Tanh(float x) {
  const float e = Exp2(x * (2.0f * kLog2E));
  const float large = 1.0f - __fdividef(2.0f, 1.0f + fminf(e, 1e30f));
  const float x2 = x * x;
  float series = fmaf(x2, -17.0f / 315.0f, 2.0f / 15.0f);
  series = fmaf(x2, series, -1.0f / 3.0f);
  series = fmaf(x2 * x, series, x);
  return fabsf(x) < 0.2f ? series : large;
}

__device__ __forceinline__ bool Stopped(const uint32_t* stop_word) {
  return stop_word != nullptr && *reinterpret_cast<const volatile uint32_t*>(stop_word) != 0;
}

// The thread's index as a value that the assembler must keep in a register: it
// would rather read the special register again, which stalls for longer than a
// copy of it is worth. (A shuffle with oneself cannot be repeated elsewhere.)
__device__ __forceinline__ uint32_t Opaque(uint32_t x) { return __shfl_xor_sync(0xffffffff, x, 0); }
__device__ __forceinline__ unsigned OpaqueThread() { return Opaque(threadIdx.x); }

// What is computed from `x` below is not moved above this, out of a loop for
// instance, where it would cost registers that accumulators need.
__device__ __forceinline__ void KeepHere(uint32_t& x) { asm volatile("" : "+r"(x)); }

// --- element types -----------------------------------------------------------

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// Two floats rounded into one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t Pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t Pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The reverse.
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t packed);
template <>
__device__ __forceinline__ float2 Unpack<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 Unpack<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// --- barriers of some of a block's warps --------------------------------------

// `barrier` 1 to 15. Of kThreads threads some may only arrive: what they wrote
// before is seen by those that wait.
template <int kThreads>
__device__ __forceinline__ void SyncThreads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void ArriveThreads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// --- asynchronous copies -----------------------------------------------------

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes.
__device__ __forceinline__ void CopyAsync16(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
               : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes when !valid (then nothing is read).
__device__ __forceinline__ void CopyAsync16(uint32_t target, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Copies one float, or writes 0 when !valid.
__device__ __forceinline__ void CopyAsync4(uint32_t target, const float* source, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ldmatrix positions, as Offset(row, chunk) of a lane, for one 16 x 16 group:
//   A row-major, and B whose rows are the product's inner axis (transposed load):
//     (lane % 16, lane / 16)
//   B row-major in its columns (k of q k^T), and A stored transposed (transposed load):
//     (lane % 8 + 8 (lane / 16), lane / 8 % 2)
//
// --- shared tiles ------------------------------------------------------------

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

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four 8 x 8 matrices, whose rows LoadMatrices would find at the same
// addresses: r[0] rows 0 to 7, r[1] rows 8 to 15, r[2] and r[3] the
// same of the next 8 columns.
__device__ __forceinline__ void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  // Lane l holds row l / 4 of each matrix, whose address lane 8 i + l / 4 has.
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(0xffffffff, address, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(r[i]) : "memory");
  }
#endif
}

__device__ __forceinline__ float LoadShared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// d[16x8] += a[16x16] b[16x8], fp32 accumulation; with kFresh d is only written.
template <typename T, bool kFresh = false>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
#define RINGATTN_MMA(type)                                                                   \
  if constexpr (kFresh) {                                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                      \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"            \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f)); \
  } else {                                                                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                      \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));            \
  }
  if constexpr (sizeof(T) == 2 && __is_same(T, __half)) {
    RINGATTN_MMA("f16")
  } else {
    RINGATTN_MMA("bf16")
  }
#undef RINGATTN_MMA
}

// Copies kRows rows of a token-major tensor into a tile with 16-byte copies:
// neighbouring threads take the chunks of one row, then rows. A thread's source
// position differs between tiles only by the tile's origin, so that callers keep
// one running pointer: origin + ThreadOffset(thread, row_stride).
template <typename T, int kColumns, int kRows, int kThreads>
struct TileCopy {
  using Tile = SharedTile<kColumns>;
  static constexpr int kGroup = Tile::kWide ? 8 : 4;  // chunks that are permuted together
  static constexpr int kRowsPerPass = kThreads / kGroup;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0);

  static __device__ __forceinline__ int64_t ThreadOffset(unsigned thread, int64_t row_stride) {
    return thread / kGroup * row_stride + thread % kGroup * 8;
  }

  // Rows from valid_rows on and columns from `columns` on become zero, so that
  // garbage times a zero probability never yields NaN. Complete after
  // CommitCopies, WaitCopies and a barrier.
  static __device__ __forceinline__ void Start(uint32_t tile, unsigned thread,
                                               const T* thread_source, int64_t row_stride,
                                               int valid_rows, int columns) {
    KeepHere(thread);
    const int row = thread / kGroup;
    const int chunk = thread % kGroup;
    const uint32_t target = tile + Tile::Offset(row, chunk);
    if (valid_rows >= kRows && columns == kColumns) {  // the usual case, in half the instructions
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int group = 0; group < Tile::kChunks / kGroup; ++group) {
          CopyAsync16(target + pass * kRowsPerPass * Tile::kRowBytes + group * kGroup * 16,
                      thread_source + group * kGroup * 8);
        }
        thread_source += kRowsPerPass * row_stride;
      }
      return;
    }
    const int rows_left = valid_rows - row;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int group = 0; group < Tile::kChunks / kGroup; ++group) {
        const bool valid =
            pass * kRowsPerPass < rows_left && (group * kGroup + chunk) * 8 < columns;
        CopyAsync16(target + pass * kRowsPerPass * Tile::kRowBytes + group * kGroup * 16,
                    thread_source + group * kGroup * 8, valid);
      }
      thread_source += kRowsPerPass * row_stride;
    }
  }

  // The same by element accesses, for any alignment; `source` is the origin.
  // Complete after a barrier.
  static __device__ __noinline__ void CopyUnaligned(uint32_t tile, unsigned thread, const T* source,
                                                    int64_t row_stride, int valid_rows,
                                                    int columns) {
    for (int index = thread; index < kRows * Tile::kChunks * 4; index += kThreads) {
      const int row = index / (Tile::kChunks * 4);
      const int pair = index % (Tile::kChunks * 4);
      uint32_t bits = 0;
      if (row < valid_rows) {
        const uint16_t* from =
            reinterpret_cast<const uint16_t*>(source + row * row_stride) + pair * 2;
        if (pair * 2 < columns) bits = from[0];
        if (pair * 2 + 1 < columns) bits |= static_cast<uint32_t>(from[1]) << 16;
      }
      asm volatile(
          "st.shared.b32 [%0], %1;" ::"r"(tile + Tile::Offset(row, pair / 4) + (pair % 4) * 4),
          "r"(bits)
          : "memory");
    }
  }

  // Tiles one after another by either of the two, where the threads are the whole
  // block: the running source of the first tile; the next one's copy, which moves it.
  static __device__ __forceinline__ const T* First(const T* origin, unsigned thread,
                                                   int64_t row_stride, bool vector) {
    return vector ? origin + ThreadOffset(thread, row_stride) : origin;
  }
  static __device__ __forceinline__ void Next(uint32_t tile, unsigned thread, const T*& source,
                                              int64_t row_stride, int valid_rows, int columns,
                                              bool vector) {
    if (vector) {
      Start(tile, thread, source, row_stride, valid_rows, columns);
    } else {
      CopyUnaligned(tile, threadIdx.x, source, row_stride, valid_rows, columns);
    }
    source += kRows * row_stride;
  }

  // One tile by either of the two; `source` is the origin.
  static __device__ __forceinline__ void Load(uint32_t tile, unsigned thread, const T* source,
                                              int64_t row_stride, int valid_rows, int columns,
                                              bool vector) {
    if (vector) {
      Start(tile, thread, source + ThreadOffset(thread, row_stride), row_stride, valid_rows,
            columns);
    } else {
      CopyUnaligned(tile, thread, source, row_stride, valid_rows, columns);
    }
  }
};

// --- bands -------------------------------------------------------------------

__device__ __forceinline__ int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && a < 0);
}

// Columns [*lower, *upper] that row r of the range sees (before the range's end).
__device__ __forceinline__ void RowLimits(const BandLimits& limits, int row, int* lower,
                                          int* upper) {
  if (limits.same_stride) {
    *lower = limits.first_lower + row;
    *upper = limits.first_upper + row;
    return;
  }
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t low = -FloorDivide(-(limits.lower_base + limits.q_stride * row), limits.k_stride);
  const int64_t high = FloorDivide(limits.upper_base + limits.q_stride * row, limits.k_stride);
  *lower = static_cast<int>(low < -kLimit ? -kLimit : low > kLimit ? kLimit : low);
  *upper = static_cast<int>(high < -kLimit ? -kLimit : high > kLimit ? kLimit : high);
}

// --- merge and reductions ----------------------------------------------------

// Mirrors common/attention/merge.h.
struct DeviceMerge {
  float first;
  float second;
  float lse;
};
__device__ __forceinline__ DeviceMerge MergeDeviceLse(float lse_first, float lse_second) {
  const float none = NegativeInfinity();
  if (lse_first == none && lse_second == none) return {0.0f, 0.0f, none};
  const float max = lse_first > lse_second || lse_first != lse_first ? lse_first : lse_second;
  const float first = expf(lse_first - max);
  const float second = expf(lse_second - max);
  const float sum = first + second;
  return {first / sum, second / sum, max + logf(sum)};
}

__device__ __forceinline__ void ReduceAdd(float* target, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}

// target is aligned to 8 bytes.
__device__ __forceinline__ void ReduceAdd2(float* target, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};" ::"l"(target), "f"(x), "f"(y) : "memory");
#else
  ReduceAdd(target, x);
  ReduceAdd(target + 1, y);
#endif
}

// Tensor reductions by the copy engine (sm_90). All threads that wrote the shared
// box call FenceBulkReads before the barrier that precedes StartTensorAdd; one
// thread starts, commits and waits.
__device__ __forceinline__ void FenceBulkReads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void StartTensorAdd(const void* map, uint32_t source, int column,
                                               int head, int row, int batch) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
      "r"(column), "r"(head), "r"(row), "r"(batch), "r"(source)
      : "memory");
#endif
}
__device__ __forceinline__ void CommitBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// What this thread committed has read shared memory / is complete.
__device__ __forceinline__ void WaitBulkReads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Adds scale times a warp tile of accumulators (mma layout) to fp32 rows in
// global memory. Groups of 16 rows lie kRowStep apart, groups of 16 columns
// kColumnStep apart. `target` is the lane's first element (row lane / 4, column
// 2 (lane % 4) of the first group), `row` and `column` its position, for the
// bounds; `whole` says that everything lies inside them.
template <int kRowTiles, int kColumnTiles, int kRowStep, int kColumnStep>
__device__ __forceinline__ void ReduceTile(const float (&acc)[kRowTiles][kColumnTiles][4],
                                           float scale, float* target, int64_t row_stride, int row,
                                           int rows, int column, int columns, bool whole) {
  if (whole) {
    // All row addresses first: a reduction reads its address late, and one
    // register pair for all of them would make each row wait for the last.
    float* row_targets[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_targets[m][half] = target + (m * kRowStep + half * 8) * row_stride;
        asm volatile("" : "+l"(row_targets[m][half]));
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          ReduceAdd2(row_targets[m][half] + n / 2 * kColumnStep + n % 2 * 8,
                     scale * acc[m][n][half * 2], scale * acc[m][n][half * 2 + 1]);
        }
      }
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + m * kRowStep + half * 8 >= rows) continue;
      float* row_target = target + (m * kRowStep + half * 8) * row_stride;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const int at = n / 2 * kColumnStep + n % 2 * 8;
        if (column + at < columns) ReduceAdd(row_target + at, scale * acc[m][n][half * 2]);
        if (column + at + 1 < columns) {
          ReduceAdd(row_target + at + 1, scale * acc[m][n][half * 2 + 1]);
        }
      }
    }
  }
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_DEVICE_PRIMITIVES_CUH_
