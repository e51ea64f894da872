#include "worker/kernels/cuda/part_rows.h"

#include <algorithm>

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaximalBlocks = 132 * 32;  // more elements: grid-stride loops

int BlocksFor(int64_t items) {
  return static_cast<int>(
      std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaximalBlocks));
}

__device__ __forceinline__ int64_t FirstItem() {
  return blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
}
__device__ __forceinline__ int64_t ItemStep() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// Requires numbers >= 0. Most numbers are small, and a 64-bit division is slow.
__device__ __forceinline__ int64_t Divide(int64_t number, int64_t by) {
  if (((number | by) >> 32) != 0) return number / by;
  return static_cast<uint32_t>(number) / static_cast<uint32_t>(by);
}

// Returns the whole's row that is the part's row part_row: searches the last run that begins at or
// before it.
__device__ __forceinline__ int64_t RowOf(const GatherParams& params, int64_t part_row) {
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

// Returns the index of a row and head in [outer, rows, heads] or [outer, heads, rows].
__device__ __forceinline__ int64_t PlaceOf(bool heads_first, int64_t outer, int64_t rows,
                                           int64_t heads, int64_t row, int64_t head) {
  return heads_first ? (outer * heads + head) * rows + row : (outer * rows + row) * heads + head;
}

// Copies `Unit` bytes at a time, in the part's order. All sizes and addresses are multiples of
// `Unit`.
template <typename Unit>
__global__ void gather_rows(GatherParams params) {
  const int64_t units = params.inner_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t count = params.outer * params.part_rows * params.part_heads * units;
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) {
    const int64_t place = Divide(i, units);
    const int64_t unit = i - place * units;
    const int64_t inner = params.heads_first ? params.part_rows : params.part_heads;
    const int64_t middle = params.heads_first ? params.part_heads : params.part_rows;
    const int64_t next = Divide(place, inner);
    const int64_t fast = place - next * inner;
    const int64_t outer = Divide(next, middle);
    const int64_t slow = next - outer * middle;
    const int64_t row = RowOf(params, params.heads_first ? fast : slow);
    const int64_t head = params.head_of[params.heads_first ? slow : fast];
    const int64_t source = PlaceOf(params.heads_first, outer, params.rows, params.heads, row, head);
    reinterpret_cast<Unit*>(params.part)[i] =
        reinterpret_cast<const Unit*>(params.whole)[source * units + unit];
  }
}

// Returns the part's index of the whole's row, or -1.
__device__ __forceinline__ int64_t PartRowOf(const RowRun* runs, int64_t run_count, int64_t row) {
  int64_t low = 0, high = run_count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (runs[middle].begin <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  if (high == 0) return -1;
  const RowRun& run = runs[low];
  const int64_t behind = row - run.begin;
  if (behind < 0 || behind > (run.count - 1) * run.step) return -1;
  const int64_t number = Divide(behind, run.step);
  return number * run.step == behind ? run.first + number : -1;
}

// A row and head of the whole, from its index in memory.
struct WarpRow {
  int64_t outer;
  int64_t row;
  int64_t head;
};

__device__ __forceinline__ WarpRow WarpRowAt(const ScatterParams& params, int64_t place) {
  const int64_t inner = params.heads_first ? params.rows : params.heads;
  const int64_t middle = params.heads_first ? params.heads : params.rows;
  const int64_t next = Divide(place, inner);
  const int64_t fast = place - next * inner;
  const int64_t outer = Divide(next, middle);
  const int64_t slow = next - outer * middle;
  return {outer, params.heads_first ? fast : slow, params.heads_first ? slow : fast};
}

// A lane's elements of up to kRowElements of a row: groups of four if the row's address and width
// allow it, otherwise every 32nd element. The loads are independent.
constexpr int kLaneElements = 8;
constexpr int kRowElements = 32 * kLaneElements;

template <bool kFours>
__device__ __forceinline__ int ElementOf(int lane, int e) {
  return kFours ? 4 * lane + 128 * (e / 4) + e % 4 : lane + 32 * e;
}

template <bool kFours>
__device__ __forceinline__ void LoadRow(const float* row, int64_t width, int lane,
                                        float (&values)[kLaneElements]) {
#pragma unroll
  for (int e = 0; e < kLaneElements; e += kFours ? 4 : 1) {
    const int element = ElementOf<kFours>(lane, e);
    if constexpr (kFours) {
      float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
      if (element < width) four = *reinterpret_cast<const float4*>(row + element);
      values[e] = four.x, values[e + 1] = four.y, values[e + 2] = four.z, values[e + 3] = four.w;
    } else {
      values[e] = element < width ? row[element] : 0.0f;
    }
  }
}

__device__ __forceinline__ void StoreFour(float* target, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(target) = {a, b, c, d};
}
template <typename T>
__device__ __forceinline__ void StoreFour(T* target, float a, float b, float c, float d) {
  *reinterpret_cast<uint2*>(target) = {Pack<T>(a, b), Pack<T>(c, d)};
}

template <bool kFours, typename T>
__device__ __forceinline__ void StoreRow(const float (&values)[kLaneElements], int64_t width,
                                         int lane, T* row) {
#pragma unroll
  for (int e = 0; e < kLaneElements; e += kFours ? 4 : 1) {
    const int element = ElementOf<kFours>(lane, e);
    if (element >= width) continue;
    if constexpr (kFours) {
      StoreFour(row + element, values[e], values[e + 1], values[e + 2], values[e + 3]);
    } else {
      row[element] = FromFloat<T>(values[e]);
    }
  }
}

__device__ __forceinline__ float2 WeightsOf(float& lse, float with) {
  const float max = lse > with || isnan(lse) ? lse : with;
  const float first = lse == NegativeInfinity() ? 0.0f : expf(lse - max);
  const float second = expf(with - max);
  const float sum = first + second;
  lse = max + logf(sum);
  return {first / sum, second / sum};
}

// Tables up to this size are copied to shared memory. This shortens the lookup of a row, and a row
// that no part has needs no other access.
constexpr int64_t kSharedTables = 16 << 10;

// Returns the tables' address, for all threads of the block.
__device__ __forceinline__ const char* TablesOf(const ScatterParams& params) {
  __shared__ uint4 tables[kSharedTables / sizeof(uint4)];
  if (params.table_bytes > kSharedTables) return params.tables;
  const auto count = static_cast<int>(params.table_bytes / static_cast<int64_t>(sizeof(uint4)));
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    tables[i] = reinterpret_cast<const uint4*>(params.tables)[i];
  }
  __syncthreads();
  return reinterpret_cast<const char*>(tables);
}

// One warp per row and head of the whole adds the parts' values, or merges them as
// common/attention/merge.h does. A block processes neighbouring rows. The parts that have a row
// differ from row to row.
template <typename Out, bool kMerges, bool kFours>
__global__ void __launch_bounds__(kThreads, 4) scatter_parts(ScatterParams params) {
  const char* const tables = TablesOf(params);
  const auto* const parts = reinterpret_cast<const ScatterSource*>(tables);
  const auto* const runs = reinterpret_cast<const RowRun*>(tables + params.runs_offset);
  const auto* const begins = reinterpret_cast<const int32_t*>(tables + params.begin_offset);
  const auto* const heads_of = reinterpret_cast<const ScatterHead*>(tables + params.heads_offset);
  const int lane = threadIdx.x & 31;
  const int64_t count = params.outer * params.rows * params.heads;
  const int64_t per_block = (count + gridDim.x - 1) / gridDim.x;
  const int64_t end = min(count, (blockIdx.x + 1) * per_block);
  for (int64_t i = blockIdx.x * per_block + threadIdx.x / 32; i < end; i += kThreads / 32) {
    const WarpRow at = WarpRowAt(params, i);
    const int64_t lse_at = PlaceOf(true, at.outer, params.rows, params.heads, at.row, at.head);
    float lse_before = NegativeInfinity();
    if (kMerges && !params.initial) lse_before = params.lse[lse_at];
    float lse = lse_before;
    const int32_t heads_begin = begins[at.head];
    const int32_t heads_end = begins[at.head + 1];
    const auto row_of = [&](int32_t n) {
      const ScatterSource& part = parts[heads_of[n].part];
      return PartRowOf(runs + part.first_run, part.run_count, at.row);
    };
    // A wide row runs the loop below several times, so each lane looks up one of the first 32 parts
    // only once. (Most rows that are merged run the loop once.)
    int64_t own_row = -1;
    if (!kMerges && heads_begin + lane < heads_end) own_row = row_of(heads_begin + lane);
    bool any = params.initial || params.final;
    for (int64_t base = 0; base < params.width; base += kRowElements) {
      float values[kLaneElements] = {};
      lse = lse_before;  // each piece of a row has the same weights
      const int64_t first = i * params.width + base;
      const int64_t left = params.width - base;
      if (!params.initial) LoadRow<kFours>(params.values + first, left, lane, values);
      for (int32_t n = heads_begin; n < heads_end; ++n) {
        const bool looked_up = !kMerges && n - heads_begin < 32;
        const int64_t part_row =
            looked_up ? __shfl_sync(0xffffffff, own_row, n - heads_begin) : row_of(n);
        if (part_row < 0) continue;
        const ScatterHead head = heads_of[n];
        const ScatterSource& part = parts[head.part];
        float terms[kLaneElements];
        const int64_t from =
            PlaceOf(params.heads_first, at.outer, part.rows, part.heads, part_row, head.head);
        LoadRow<kFours>(part.values + from * params.width + base, left, lane, terms);
        float2 weights = {1.0f, 1.0f};
        if (kMerges) {
          const float with =
              part.lse[PlaceOf(true, at.outer, part.rows, part.heads, part_row, head.head)];
          // A row that saw no key is 0 and has weight 0.
          if (with == NegativeInfinity()) continue;
          weights = WeightsOf(lse, with);
        }
        any = true;
#pragma unroll
        for (int e = 0; e < kLaneElements; ++e) {
          values[e] =
              kMerges ? fmaf(weights.x, values[e], weights.y * terms[e]) : values[e] + terms[e];
        }
      }
      if (kMerges && params.sinks != nullptr && params.sinks[at.head] != NegativeInfinity()) {
        const float2 weights = WeightsOf(lse, params.sinks[at.head]);
#pragma unroll
        for (int e = 0; e < kLaneElements; ++e) values[e] *= weights.x;
      }
      if (!any) break;
      if (params.final) {
        StoreRow<kFours>(values, left, lane, static_cast<Out*>(params.result) + first);
      } else {
        StoreRow<kFours>(values, left, lane, params.values + first);
      }
    }
    if (!kMerges || !any) continue;
    __syncwarp();  // every lane has read lse
    if (lane == 0) params.lse[lse_at] = lse;
  }
}

template <typename Unit>
cudaError_t Gather(const GatherParams& params, cudaStream_t stream) {
  const int64_t count = params.outer * params.part_rows * params.part_heads *
                        (params.inner_bytes / static_cast<int64_t>(sizeof(Unit)));
  gather_rows<Unit><<<BlocksFor(count), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename Out, bool kMerges>
cudaError_t Scatter(const ScatterParams& params, cudaStream_t stream) {
  const int blocks = BlocksFor(params.outer * params.rows * params.heads * 32);
  if (params.fours) {
    scatter_parts<Out, kMerges, true><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    scatter_parts<Out, kMerges, false><<<blocks, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

template <typename Out>
cudaError_t Scatter(const ScatterParams& params, cudaStream_t stream) {
  return params.merges ? Scatter<Out, true>(params, stream) : Scatter<Out, false>(params, stream);
}

template <typename Out>
void AddScatterKernels(std::vector<const void*>& kernels) {
  kernels.push_back(reinterpret_cast<const void*>(&scatter_parts<Out, true, true>));
  kernels.push_back(reinterpret_cast<const void*>(&scatter_parts<Out, true, false>));
  kernels.push_back(reinterpret_cast<const void*>(&scatter_parts<Out, false, true>));
  kernels.push_back(reinterpret_cast<const void*>(&scatter_parts<Out, false, false>));
}

}  // namespace

cudaError_t LaunchGather(const GatherParams& params, cudaStream_t stream) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(params.whole) |
                        reinterpret_cast<uintptr_t>(params.part) |
                        static_cast<uint64_t>(params.inner_bytes);
  if (bits % 16 == 0) return Gather<uint4>(params, stream);
  if (bits % 4 == 0) return Gather<uint32_t>(params, stream);
  if (bits % 2 == 0) return Gather<uint16_t>(params, stream);
  return Gather<uint8_t>(params, stream);
}

cudaError_t LaunchScatter(const ScatterParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kFloat32:
      return Scatter<float>(params, stream);
    case DType::kBFloat16:
      return Scatter<__nv_bfloat16>(params, stream);
    case DType::kFloat16:
      return Scatter<__half>(params, stream);
  }
  return cudaErrorInvalidValue;
}

std::vector<const void*> PartRowsKernels() {
  std::vector<const void*> kernels = {reinterpret_cast<const void*>(&gather_rows<uint4>),
                                      reinterpret_cast<const void*>(&gather_rows<uint32_t>),
                                      reinterpret_cast<const void*>(&gather_rows<uint16_t>),
                                      reinterpret_cast<const void*>(&gather_rows<uint8_t>)};
  AddScatterKernels<float>(kernels);
  AddScatterKernels<__nv_bfloat16>(kernels);
  AddScatterKernels<__half>(kernels);
  return kernels;
}

}  // namespace ringattn::worker::cuda
