#include "worker/kernels/cuda/part_rows.h"

#include <algorithm>

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaximalBlocks = 132 * 32;  // grid-stride loops beyond

int BlocksFor(int64_t items) {
  return static_cast<int>(
      std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaximalBlocks));
}

__device__ __forceinline__ int64_t FirstItem() {
  return blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
}
__device__ __forceinline__ int64_t ItemStep() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// The whole's row that the part has as part_row: the last run that begins at or before it.
__device__ __forceinline__ int64_t RowOf(const PartRowsParams& params, int64_t part_row) {
  int64_t low = 0, high = params.run_count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (params.runs[middle].first <= part_row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const RowRun& run = params.runs[low];
  return run.begin + (part_row - run.first) * run.step;
}

// Which row and head of [outer, rows, heads] or [outer, heads, rows].
__device__ __forceinline__ int64_t PlaceOf(bool heads_first, int64_t outer, int64_t rows,
                                           int64_t heads, int64_t row, int64_t head) {
  return heads_first ? (outer * heads + head) * rows + row : (outer * rows + row) * heads + head;
}

// `Unit` bytes at a time, to which everything is a multiple; in the part's order.
template <typename Unit>
__global__ void gather_rows(PartRowsParams params) {
  const int64_t units = params.inner_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t count = params.outer * params.part_rows * params.part_heads * units;
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) {
    const int64_t unit = i % units;
    int64_t place = i / units;
    const int64_t inner = params.heads_first ? params.part_rows : params.part_heads;
    const int64_t fast = place % inner;
    place /= inner;
    const int64_t middle = params.heads_first ? params.part_heads : params.part_rows;
    const int64_t slow = place % middle;
    const int64_t outer = place / middle;
    const int64_t row = RowOf(params, params.heads_first ? fast : slow);
    const int64_t head = params.head_of[params.heads_first ? slow : fast];
    const int64_t source = PlaceOf(params.heads_first, outer, params.rows, params.heads, row, head);
    reinterpret_cast<Unit*>(params.part)[i] =
        reinterpret_cast<const Unit*>(params.whole)[source * units + unit];
  }
}

// A thread has all heads of an element: two of them may be one of the whole's.
__global__ void add_rows(PartRowsParams params) {
  const int64_t floats = params.inner_bytes / 4;
  const int64_t count = params.outer * params.part_rows * floats;
  float* const whole = reinterpret_cast<float*>(params.whole);
  const float* const part = reinterpret_cast<const float*>(params.part);
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) {
    const int64_t element = i % floats;
    const int64_t part_row = i / floats % params.part_rows;
    const int64_t outer = i / floats / params.part_rows;
    const int64_t row = RowOf(params, part_row);
    for (int64_t h = 0; h < params.part_heads; ++h) {
      const int64_t target =
          PlaceOf(params.heads_first, outer, params.rows, params.heads, row, params.head_of[h]);
      const int64_t source =
          PlaceOf(params.heads_first, outer, params.part_rows, params.part_heads, part_row, h);
      whole[target * floats + element] += part[source * floats + element];
    }
  }
}

// One warp per row and head, as common/attention/merge.h.
__global__ void merge_rows(PartRowsParams params) {
  const int lane = threadIdx.x & 31;
  const int64_t floats = params.inner_bytes / 4;
  const int64_t count = params.outer * params.part_rows * params.part_heads;
  float* const whole = reinterpret_cast<float*>(params.whole);
  const float* const part = reinterpret_cast<const float*>(params.part);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32; i < count;
       i += warps) {
    const int64_t h = i % params.part_heads;
    const int64_t part_row = i / params.part_heads % params.part_rows;
    const int64_t outer = i / params.part_heads / params.part_rows;
    const int64_t head = params.head_of[h];
    const int64_t row = RowOf(params, part_row);
    float* const lse =
        params.whole_lse + PlaceOf(true, outer, params.rows, params.heads, row, head);
    const float before = *lse;
    const float with =
        params.part_lse[PlaceOf(true, outer, params.part_rows, params.part_heads, part_row, h)];
    // What a row that saw no key has is 0, and of no weight.
    if (with == NegativeInfinity()) continue;
    const float max = before > with || isnan(before) ? before : with;
    const float first = before == NegativeInfinity() ? 0.0f : expf(before - max);
    const float second = expf(with - max);
    const float sum = first + second;
    float* const target =
        whole + PlaceOf(false, outer, params.rows, params.heads, row, head) * floats;
    const float* const source = part + i * floats;
    for (int64_t element = lane; element < floats; element += 32) {
      target[element] = fmaf(first / sum, target[element], second / sum * source[element]);
    }
    __syncwarp();  // every lane has read lse
    if (lane == 0) *lse = max + logf(sum);
  }
}

template <typename Unit>
cudaError_t Gather(const PartRowsParams& params, cudaStream_t stream) {
  const int64_t count = params.outer * params.part_rows * params.part_heads *
                        (params.inner_bytes / static_cast<int64_t>(sizeof(Unit)));
  gather_rows<Unit><<<BlocksFor(count), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPartRows(PartCall::Kind kind, const PartRowsParams& params, cudaStream_t stream) {
  const int64_t rows = params.outer * params.part_rows;
  switch (kind) {
    case PartCall::Kind::kGather: {
      const uint64_t bits = reinterpret_cast<uintptr_t>(params.whole) |
                            reinterpret_cast<uintptr_t>(params.part) |
                            static_cast<uint64_t>(params.inner_bytes);
      if (bits % 16 == 0) return Gather<uint4>(params, stream);
      if (bits % 4 == 0) return Gather<uint32_t>(params, stream);
      if (bits % 2 == 0) return Gather<uint16_t>(params, stream);
      return Gather<uint8_t>(params, stream);
    }
    case PartCall::Kind::kAdd:
      add_rows<<<BlocksFor(rows * (params.inner_bytes / 4)), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    case PartCall::Kind::kMerge:
      merge_rows<<<BlocksFor(rows * params.part_heads * 32), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
  }
  return cudaErrorInvalidValue;
}

std::vector<const void*> PartRowsKernels() {
  return {reinterpret_cast<const void*>(&gather_rows<uint4>),
          reinterpret_cast<const void*>(&gather_rows<uint32_t>),
          reinterpret_cast<const void*>(&gather_rows<uint16_t>),
          reinterpret_cast<const void*>(&gather_rows<uint8_t>),
          reinterpret_cast<const void*>(&add_rows),
          reinterpret_cast<const void*>(&merge_rows)};
}

}  // namespace ringattn::worker::cuda
