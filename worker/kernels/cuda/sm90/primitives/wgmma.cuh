// Warpgroup matrix products (wgmma, sm_90a): descriptors of swizzled shared-memory tiles, the
// instruction, and its ordering with ordinary code.
//
// A tile in shared memory is a row of panels: 64 columns (128 bytes) of all its rows,
// in the 128-byte swizzle that the copy engine writes. Panels are aligned to 1024 bytes.
//
// Accumulators of an m64nN product: thread t of the warpgroup has rows 16 (t / 32) +
// t % 32 / 4 and that plus 8, of columns 8 n + 2 (t % 4) and the next, as
// d[4 n .. 4 n + 3]: two of the upper row, two of the lower. After conversion to 16 bits
// d[8 s .. 8 s + 7] is exactly the A fragment of k16 step s.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_WGMMA_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

// The lower words of operands' descriptors, with the address of their first panel; the
// upper word is the same for all: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
inline constexpr uint32_t kDescriptorHigh = (1u << 30) | (1024u >> 4);

// An operand that is read along its rows (A and B of q k^T): the other offset is not used. A k16
// step is 32 bytes further.
__device__ __forceinline__ uint32_t RowDescriptor(uint32_t address) {
  return (1u << 16) | (address >> 4);
}
// An operand that is read along its columns (B of p v, whose k axis is the tile's rows), in panels
// that are `panel_bytes` apart. A k16 step is 16 rows (2048 bytes) further.
__device__ __forceinline__ uint32_t ColumnDescriptor(uint32_t address, uint32_t panel_bytes) {
  return (panel_bytes >> 4 << 16) | (address >> 4);
}
// Offset in descriptor units for a number of bytes. Shared addresses never carry beyond their 14
// bits.
__device__ __forceinline__ constexpr uint32_t DescriptorBytes(uint32_t bytes) { return bytes >> 4; }

// An operand without swizzle that is read along its rows, in groups of 8 rows by 8 columns. The
// rows of a group are contiguous in 128 bytes. The groups of the second 8 columns are
// `columns_bytes` after those of the first; the group of the next 8 rows follows immediately.
__device__ __forceinline__ uint64_t PlainDescriptor(uint32_t address, uint32_t columns_bytes) {
  return uint64_t{128u >> 4} << 32 | columns_bytes >> 4 << 16 | address >> 4;
}

__device__ __forceinline__ uint64_t WholeDescriptor(uint32_t low) {
  return uint64_t{kDescriptorHigh} << 32 | low;
}

// Before the first product of a batch: registers written by ordinary code are ready.
__device__ __forceinline__ void ProductFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a batch; WaitProducts<n> waits until at most n later batches are unfinished.
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kUnfinished>
__device__ __forceinline__ void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kUnfinished) : "memory");
}

// Prevents ordinary code from moving accesses to these registers across this point: the compiler
// does not know that a product still runs after its instruction.
template <typename R, int kCount>
__device__ __forceinline__ void PinRegisters(R (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(R) == 4 && __is_same(R, float)) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

// The instruction requires its accumulators as one literal list, so lists are composed from groups
// of eight.
#define RINGATTN_D8(d, i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define RINGATTN_D16(d) RINGATTN_D8(d, 0), RINGATTN_D8(d, 8)
#define RINGATTN_D32(d) RINGATTN_D16(d), RINGATTN_D8(d, 16), RINGATTN_D8(d, 24)
#define RINGATTN_D40(d) RINGATTN_D32(d), RINGATTN_D8(d, 32)
#define RINGATTN_D48(d) RINGATTN_D40(d), RINGATTN_D8(d, 40)
#define RINGATTN_D56(d) RINGATTN_D48(d), RINGATTN_D8(d, 48)
#define RINGATTN_D64(d) RINGATTN_D56(d), RINGATTN_D8(d, 56)
#define RINGATTN_D72(d) RINGATTN_D64(d), RINGATTN_D8(d, 64)
#define RINGATTN_D80(d) RINGATTN_D72(d), RINGATTN_D8(d, 72)
#define RINGATTN_D88(d) RINGATTN_D80(d), RINGATTN_D8(d, 80)
#define RINGATTN_D96(d) RINGATTN_D88(d), RINGATTN_D8(d, 88)
#define RINGATTN_D128(d) \
  RINGATTN_D96(d), RINGATTN_D8(d, 96), RINGATTN_D8(d, 104), RINGATTN_D8(d, 112), RINGATTN_D8(d, 120)

#define RINGATTN_S16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RINGATTN_S32 RINGATTN_S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RINGATTN_S40 RINGATTN_S32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define RINGATTN_S48 RINGATTN_S40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define RINGATTN_S56 RINGATTN_S48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define RINGATTN_S64 RINGATTN_S56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define RINGATTN_S72 RINGATTN_S64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define RINGATTN_S80 RINGATTN_S72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define RINGATTN_S88 RINGATTN_S80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define RINGATTN_S96 RINGATTN_S88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define RINGATTN_S128                                                             \
  RINGATTN_S96                                                                    \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d[64 x n] (+)= A B: both operands in shared memory, read along their rows; with accumulate = 0, d
// is overwritten. p0 .. p2 are the numbers of the operands after the accumulators.
#define RINGATTN_WGMMA_SHARED(n, count, type, p0, p1, p2)                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p2                          \
               ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" RINGATTN_S##count "}, " p0 ", " p1 ", p, 1, 1, 0, 0;\n}\n" \
               : RINGATTN_D##count(d)                                          \
               : "l"(a), "l"(b), "r"(accumulate))

// The same, but B is read along its columns.
#define RINGATTN_WGMMA_COLUMNS(n, count, type, p0, p1, p2)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p2                          \
               ", 0;\n"                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" RINGATTN_S##count "}, " p0 ", " p1 ", p, 1, 1, 0, 1;\n}\n" \
               : RINGATTN_D##count(d)                                          \
               : "l"(a), "l"(b), "r"(accumulate))

// d[64 x n] (+)= A B: A in registers, B in shared memory, read along its columns.
#define RINGATTN_WGMMA_REGISTERS(n, count, type, p0, p1, p2, p3, p4, p5)                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p5                                              \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                     \
               " {" RINGATTN_S##count "}, {" p0 "," p1 "," p2 "," p3 "}, " p4 ", p, 1, 1, 1;\n}\n" \
               : RINGATTN_D##count(d)                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// The same, but B is read along its rows.
#define RINGATTN_WGMMA_ROWS(n, count, type, p0, p1, p2, p3, p4, p5)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p5                                              \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                     \
               " {" RINGATTN_S##count "}, {" p0 "," p1 "," p2 "," p3 "}, " p4 ", p, 1, 1, 0;\n}\n" \
               : RINGATTN_D##count(d)                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define RINGATTN_WGMMA(kind, n, count, ...)               \
  if constexpr (__is_same(T, __half)) {                   \
    RINGATTN_WGMMA_##kind(n, count, "f16", __VA_ARGS__);  \
  } else {                                                \
    RINGATTN_WGMMA_##kind(n, count, "bf16", __VA_ARGS__); \
  }

// Scores: kCount = n / 2 accumulators per thread.
template <typename T, int kCount>
__device__ __forceinline__ void MultiplyShared(float (&d)[kCount], uint32_t a_descriptor,
                                               uint32_t b_descriptor, int accumulate) {
  const uint64_t a = WholeDescriptor(a_descriptor);
  const uint64_t b = WholeDescriptor(b_descriptor);
  if constexpr (kCount == 32) {
    RINGATTN_WGMMA(SHARED, 64, 32, "%32", "%33", "%34")
  } else if constexpr (kCount == 40) {
    RINGATTN_WGMMA(SHARED, 80, 40, "%40", "%41", "%42")
  } else if constexpr (kCount == 48) {
    RINGATTN_WGMMA(SHARED, 96, 48, "%48", "%49", "%50")
  } else if constexpr (kCount == 56) {
    RINGATTN_WGMMA(SHARED, 112, 56, "%56", "%57", "%58")
  } else if constexpr (kCount == 64) {
    RINGATTN_WGMMA(SHARED, 128, 64, "%64", "%65", "%66")
  } else if constexpr (kCount == 72) {
    RINGATTN_WGMMA(SHARED, 144, 72, "%72", "%73", "%74")
  } else if constexpr (kCount == 80) {
    RINGATTN_WGMMA(SHARED, 160, 80, "%80", "%81", "%82")
  } else {
    static_assert(kCount == 88, "no product of this width");
    RINGATTN_WGMMA(SHARED, 176, 88, "%88", "%89", "%90")
  }
}

// Output: kCount = n / 2 accumulators per thread.
template <typename T, int kCount>
__device__ __forceinline__ void MultiplyRegisters(float (&d)[kCount], const uint32_t* a,
                                                  uint32_t b_descriptor, int accumulate) {
  const uint64_t b = WholeDescriptor(b_descriptor);
  if constexpr (kCount == 32) {
    RINGATTN_WGMMA(REGISTERS, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
  } else if constexpr (kCount == 48) {
    RINGATTN_WGMMA(REGISTERS, 96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
  } else if constexpr (kCount == 64) {
    RINGATTN_WGMMA(REGISTERS, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
  } else if constexpr (kCount == 96) {
    RINGATTN_WGMMA(REGISTERS, 192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
  } else {
    static_assert(kCount == 128, "no product of this width");
    RINGATTN_WGMMA(REGISTERS, 256, 128, "%128", "%129", "%130", "%131", "%132", "%133")
  }
}

// One step of scores: A in registers; the whole descriptor of B, read along its rows.
template <typename T, int kCount>
__device__ __forceinline__ void MultiplyRowsByRegisters(float (&d)[kCount], const uint32_t (&a)[4],
                                                        uint64_t b, int accumulate) {
  if constexpr (kCount == 32) {
    RINGATTN_WGMMA(ROWS, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
  } else {
    static_assert(kCount == 64, "no product of this width");
    RINGATTN_WGMMA(ROWS, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
  }
}

// The same product as MultiplyRegisters with A in shared memory, read along its rows.
template <typename T, int kCount>
__device__ __forceinline__ void MultiplySharedColumns(float (&d)[kCount], uint32_t a_descriptor,
                                                      uint32_t b_descriptor, int accumulate) {
  const uint64_t a = WholeDescriptor(a_descriptor);
  const uint64_t b = WholeDescriptor(b_descriptor);
  if constexpr (kCount == 16) {
    RINGATTN_WGMMA(COLUMNS, 32, 16, "%16", "%17", "%18")
  } else {
    static_assert(kCount == 32, "no product of this width");
    RINGATTN_WGMMA(COLUMNS, 64, 32, "%32", "%33", "%34")
  }
}

#undef RINGATTN_WGMMA
#undef RINGATTN_WGMMA_SHARED
#undef RINGATTN_WGMMA_COLUMNS
#undef RINGATTN_WGMMA_REGISTERS
#undef RINGATTN_WGMMA_ROWS

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_WGMMA_CUH_
