// Dropout's bits of a backward's tiles. A Philox call covers eight keys of a row; in transposed
// scores eight lanes of two warps hold these keys. A consumer group therefore computes each call
// once and stores the bits in shared memory, where every thread reads those of its keys. The calls
// run between the tile's exponentials, for which the group waits: one unit computes exponentials at
// an eighth of the instruction rate.
//
// The bits are stored in the group's panel of that tile's dS. No thread reads the panel before the
// tile's dS is written. Each warp's bits are where the warp itself writes its keys' dS after
// reading them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_KEEP_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_KEEP_CUH_

#include "worker/kernels/cuda/plan/keep_bits.h"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_scores.cuh"

namespace ringattn::worker::cuda::sm90 {

// A group's words of one tile: the bits of a key for 32 rows, lowest first.
template <typename Shape>
struct KeepWords {
  static constexpr int kWords = Shape::kRows / 32;  // of one key

  char* const panel;  // the group's dS panel of the first stage
  const int group;

  __device__ __forceinline__ KeepWords(char* memory, int group)
      : panel(memory + Shape::kScores + group * Shape::kScorePanelBytes), group(group) {}

  // Returns the address of four words of warp `warp`: of its keys 2 pair and 2 pair + 1, and of the
  // keys eight further.
  __device__ __forceinline__ uint32_t* Place(int stage, int warp, int pair, int rows) const {
    const int row = pair * kWords + rows;  // of dS
    return reinterpret_cast<uint32_t*>(panel + stage * Shape::kScoreBytes + row * kPanelRowBytes +
                                       (warp * 2 ^ (row & 7)) * 16);
  }

  // The bits of a thread's pairs in the scores' order.
  struct Thread {
    uint32_t bits[kWords / 2];

    // Returns the bit of key half `half` and the row of columns 8 n + i.
    __device__ __forceinline__ bool Has(int n, int half, int i) const {
      return bits[n / 8] >> (n % 8 * 4 + half * 2 + i) & 1;
    }
  };

  // Call it after Await.
  __device__ __forceinline__ void Read(int stage, Thread& thread) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
    uint32_t bytes[kWords];  // the first and the third
#pragma unroll
    for (int rows = 0; rows < kWords; ++rows) {
      const uint32_t* const words = Place(stage, warp, lane / 8, rows) + lane / 4 % 2;
      // The thread's two of every eight rows: those at 8 n for both keys, then those at 4 n.
      const uint32_t first = words[0] >> (lane % 4 * 2) & 0x03030303;
      const uint32_t four = (words[2] >> (lane % 4 * 2) << 2 & 0x0c0c0c0c) | first;
      bytes[rows] = four >> 4 | four;
    }
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      thread.bits[i] = __byte_perm(bytes[2 * i], bytes[2 * i + 1], 0x6420);
    }
  }

  // Waits until all of the group's warps have written.
  __device__ __forceinline__ void Await() const { SyncThreads<128>(Shape::kKeepReady + group); }

  // Returns whether the tile's keys are consecutive and begin at a multiple of 32, as in nearly all
  // tiles.
  __device__ __forceinline__ bool ByCalls(const TermBackwardKernelParams& params,
                                          const TermQueryTile& tile) const {
    return params.stride == 1 && FirstKey(params, tile) % 32 == 0;
  }

  // Executed by all warps of the group, each for a quarter of the words. `exponentials` computes
  // those of the thread's scores in eight rows (one of kRows / 8 sets) with the multiplier that it
  // receives. The multiplier is combined, through bits that are always 0, with the result of a
  // Philox round; otherwise ptxas would place all exponentials first. REQUIRES: ByCalls.
  template <typename Exponentials>
  __device__ __forceinline__ void WriteBeside(const TermBackwardKernelParams& params,
                                              const TermQueryTile& tile, int stage,
                                              float multiplier,
                                              const Exponentials& exponentials) const {
    const TermParams& terms = params.terms;
    const uint32_t head = tile.head * terms.head_step + terms.first_head;
    const uint32_t batch = tile.batch_row + terms.first_batch;
    const int lane = threadIdx.x & 31, pair = threadIdx.x / 32 % 4;
    const uint32_t row = static_cast<uint32_t>(tile.first_query) + lane + terms.first_query;
    uint32_t counter = static_cast<uint32_t>(FirstKey(params, tile) / 8) + pair;
    const uint32_t threshold = terms.threshold << 16;
    constexpr int kCalls = Shape::kRows == 64 ? 4 : 2;  // side by side, limited by the registers
    float factor = multiplier;
#pragma unroll
    for (int first = 0; first < 2 * kWords; first += kCalls) {
      PhiloxBlock x[kCalls];
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const int word = (first + call) / kWords, rows = (first + call) % kWords;
        x[call] = JoinPhilox(RowPartOf(params.keys, row + rows * 32, head),
                             CounterPartOf(params.keys, counter + 4 * word, head, batch));
      }
#pragma unroll
      for (int round = kPhiloxJoined; round < kPhiloxRounds; ++round) {
        const int step = round - kPhiloxJoined;
        if (step % 2 == 0) {
#pragma unroll
          for (int i = 0; i < kCalls / 2; ++i) {
            exponentials(first * 2 + step / 2 * (kCalls / 2) + i, factor);
          }
        }
#pragma unroll
        for (int call = 0; call < kCalls; ++call) {
          x[call] = PhiloxRound(params.keys, x[call], round);
        }
        factor =
            __int_as_float(__float_as_int(multiplier) | (x[step / 2 % kCalls].x1 & params.zero));
      }
      counter |= x[0].x1 & params.zero;
      uint32_t kept[kCalls][8];
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const uint32_t parts[4] = {x[call].x0, x[call].x1, x[call].x2, x[call].x3};
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          kept[call][part * 2] = __ballot_sync(0xffffffff, parts[part] << 16 >= threshold);
          kept[call][part * 2 + 1] = __ballot_sync(0xffffffff, parts[part] >= threshold);
        }
      }
      if (lane != 0) continue;
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const int word = (first + call) / kWords, rows = (first + call) % kWords;
#pragma unroll
        for (int warp = 0; warp < 2; ++warp) {
          const uint32_t* const four = kept[call] + warp * 4;
          *reinterpret_cast<uint4*>(Place(stage, word * 2 + warp, pair, rows)) =
              make_uint4(four[0], four[1], four[2], four[3]);
        }
      }
    }
  }

  // The same without exponentials, for any offset and stride, with one call per pair.
  __device__ __forceinline__ void Write(const TermBackwardKernelParams& params,
                                        const TermQueryTile& tile, int stage) const {
    if (ByCalls(params, tile)) {
      WriteBeside(params, tile, stage, 0.0f, [](int, float) {});
      return;
    }
    const TermParams& terms = params.terms;
    const uint64_t key = FirstKey(params, tile);
    const uint32_t head = tile.head * terms.head_step + terms.first_head;
    const uint32_t batch = tile.batch_row + terms.first_batch;
    const int lane = threadIdx.x & 31, pair = threadIdx.x / 32 % 4;
    const uint32_t row =
        static_cast<uint32_t>(tile.first_query + int64_t{params.stride} * lane) + terms.first_query;
#pragma unroll 1
    for (int at = 0; at < 16 * kWords; ++at) {
      const int rows = at / 16, word = at / 8 % 2, lanes = at % 8;
      const PhiloxRow own = {terms.key0, terms.key1, row + params.stride * rows * 32, head, batch};
      const int64_t column = word * 32 + lanes / 2 * 8 + pair * 2 + lanes % 2;
      const bool keeps =
          Keeps(own, key + static_cast<uint64_t>(params.stride * column), terms.threshold);
      const uint32_t kept = __ballot_sync(0xffffffff, keeps);
      if (lane == 0) Place(stage, word * 2 + lanes / 4, pair, rows)[lanes % 4] = kept;
    }
  }

 private:
  // Returns the position of the group's first key.
  __device__ __forceinline__ uint64_t FirstKey(const TermBackwardKernelParams& params,
                                               const TermQueryTile& tile) const {
    return static_cast<uint64_t>(tile.first_key) + params.terms.first_key +
           static_cast<uint64_t>(int64_t{params.stride} * group * 64);
  }
};

// For kernels without them.
struct NoKeepWords {
  using Thread = KeptBits;
  __device__ __forceinline__ NoKeepWords(char*, int) {}
};

template <typename Shape>
struct KeepWordsOrNot {
  using Type = NoKeepWords;
};
template <typename Shape>
requires(Shape::kKeepWords) struct KeepWordsOrNot<Shape> {
  using Type = KeepWords<Shape>;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_KEEP_CUH_
