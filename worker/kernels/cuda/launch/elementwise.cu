#include "worker/kernels/cuda/launch/elementwise.h"

#include <algorithm>
#include <limits>

#include "worker/kernels/cuda/primitives/forward_row.cuh"
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

// One warp per (batch, row, head): out and dout are read in memory order.
//   dlse, lse  null, or like delta
template <typename T, typename Out>
__global__ void attention_delta(const Out* __restrict__ out, const T* __restrict__ dout,
                                float* __restrict__ delta, const float* __restrict__ dlse,
                                const float* __restrict__ lse, int64_t batch, int64_t rows,
                                int num_heads, int columns) {
  const int lane = threadIdx.x & 31;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const int64_t count = batch * rows * num_heads;
  for (int64_t index = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
       index < count; index += warps) {
    const Out* a = out + index * columns;
    const T* b = dout + index * columns;
    float sum = 0.0f;
    for (int column = lane; column < columns; column += 32) {
      sum = fmaf(ToFloat(a[column]), ToFloat(b[column]), sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0) {
      const int64_t head = index % num_heads;
      const int64_t row = index / num_heads % rows;
      const int64_t b_index = index / num_heads / rows;
      const int64_t at = (b_index * num_heads + head) * rows + row;
      if (dlse != nullptr) sum = lse[at] == NegativeInfinity() ? 0.0f : sum - dlse[at];
      delta[at] = sum;
    }
  }
}

// Eight consecutive elements.
template <typename T>
__device__ __forceinline__ void LoadEight(const T* source, float (&x)[8]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = reinterpret_cast<const float4*>(source)[i];
      x[i * 4] = four.x, x[i * 4 + 1] = four.y, x[i * 4 + 2] = four.z, x[i * 4 + 3] = four.w;
    }
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(source);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Unpack<T>((&words.x)[i]);
      x[i * 2] = pair.x, x[i * 2 + 1] = pair.y;
    }
  }
}

// The same for rows of whole vectors of eight elements, at most 32 vectors. Each row is handled by
// `lanes` threads (a power of two). The kernel also sets `zeroed` groups of four floats to 0, in
// buffers to which a backward adds. These stores overlap the reads and add no time.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    attention_delta_vectors(const Out* __restrict__ out, const T* __restrict__ dout,
                            float* __restrict__ delta, const float* __restrict__ dlse,
                            const float* __restrict__ lse, uint32_t count, uint32_t rows,
                            uint32_t num_heads, int columns, int lanes, float4* __restrict__ zeros,
                            int64_t zeroed) {
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = thread; i < zeroed; i += threads) zeros[i] = float4{};
  const int lane = threadIdx.x & (lanes - 1);
  const bool has_columns = lane * 8 < columns;
  const int64_t step = threads / lanes;
  // All of a warp's lanes stay for the shuffles.
  for (int64_t first = thread / 32 * (32 / lanes); first < count; first += step) {
    const int64_t index = first + (threadIdx.x & 31) / lanes;
    float sum = 0.0f;
    if (index < count && has_columns) {
      float a[8], b[8];
      LoadEight(out + index * columns + lane * 8, a);
      LoadEight(dout + index * columns + lane * 8, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
    }
    for (int other = lanes / 2; other > 0; other /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, other);
    }
    if (lane != 0 || index >= count) continue;
    const uint32_t place = static_cast<uint32_t>(index);
    const uint32_t head = place % num_heads;
    const uint32_t row = place / num_heads % rows;
    const uint32_t batch = place / num_heads / rows;
    const int64_t at = (static_cast<int64_t>(batch) * num_heads + head) * rows + row;
    if (dlse != nullptr) sum = lse[at] == NegativeInfinity() ? 0.0f : sum - dlse[at];
    delta[at] = sum;
  }
}

// One block per head: each thread sums every kThreads-th row, then the threads' sums are added
// pairwise, so that the order is the same in every run.
__global__ void __launch_bounds__(kThreads)
    sink_gradient(const float* __restrict__ sinks, const float* __restrict__ lse,
                  const float* __restrict__ delta, float* __restrict__ dsinks, int64_t batch,
                  int64_t rows) {
  __shared__ double sums[kThreads];
  const int head = blockIdx.x;
  const float sink = sinks[head];
  double sum = 0.0;
  for (int64_t b = 0; b < batch && sink != NegativeInfinity(); ++b) {
    const int64_t first = (b * gridDim.x + head) * rows;
    for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
      sum -= static_cast<double>(expf(sink - lse[first + row])) * delta[first + row];
    }
  }
  sums[threadIdx.x] = sum;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) dsinks[head] = static_cast<float>(sums[0]);
}

__global__ void add_fp32(float* target, const float* source, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source)) % 16 == 0;
  const int64_t vectors = aligned ? count / 4 : 0;
  for (int64_t i = first; i < vectors; i += step) {
    float4 x = reinterpret_cast<float4*>(target)[i];
    const float4 y = reinterpret_cast<const float4*>(source)[i];
    x.x += y.x;
    x.y += y.y;
    x.z += y.z;
    x.w += y.w;
    reinterpret_cast<float4*>(target)[i] = x;
  }
  for (int64_t i = vectors * 4 + first; i < count; i += step) target[i] += source[i];
}

constexpr int kConvertBatch = 4;  // vectors that a thread loads at once

template <typename T>
__global__ void convert_from_fp32(T* target, const float* source, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const bool aligned =
      reinterpret_cast<uintptr_t>(source) % 16 == 0 && reinterpret_cast<uintptr_t>(target) % 8 == 0;
  const int64_t vectors = aligned ? count / 4 : 0;
  const auto convert = [target](int64_t i, const float4& x) {
    reinterpret_cast<uint2*>(target)[i] = make_uint2(Pack<T>(x.x, x.y), Pack<T>(x.z, x.w));
  };
  int64_t i = first;
  for (; i + (kConvertBatch - 1) * step < vectors; i += kConvertBatch * step) {
    float4 x[kConvertBatch];
#pragma unroll
    for (int n = 0; n < kConvertBatch; ++n) {
      x[n] = __ldcs(reinterpret_cast<const float4*>(source) + i + n * step);
    }
#pragma unroll
    for (int n = 0; n < kConvertBatch; ++n) convert(i + n * step, x[n]);
  }
  for (; i < vectors; i += step) convert(i, reinterpret_cast<const float4*>(source)[i]);
  for (i = vectors * 4 + first; i < count; i += step) target[i] = FromFloat<T>(source[i]);
}

// The larger of two, or the one that is a NaN.
__device__ __forceinline__ float LargerOrNan(float x, float y) { return y > x || y != y ? y : x; }

// Slots whose first columns are loaded before their weights are known, so that all loads are in
// flight at once. It is the usual number of slots (132 multiprocessors by 8 kv heads).
constexpr int kEarlySlots = 16;

// One block per (tile, packed head group, batch), one warp per row. The lanes of a warp load the
// lse of all slots at once, and each lane then reads four columns of one slot after another.
template <typename T>
__global__ void attention_combine(const __grid_constant__ CombineParams params) {
  const ForwardParams& forward = params.forward;
  const CommonParams& common = forward.common;
  const CombineTile combine = params.tiles[blockIdx.x];
#if __CUDA_ARCH__ >= 900
  // The grid may start while the forward still runs; after this wait the forward's results are
  // visible.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const bool stopped = Stopped(common.stop_word);  // loaded here, used later
  const int pack = forward.head_pack;
  const int groups = common.num_heads / pack;
  const int64_t batch = blockIdx.z;
  const int lane = threadIdx.x & 31;
  const int columns = common.head_dim_v;
  const bool vectors = columns % 4 == 0;
  ForwardTile tile;
  tile.q_row_begin = combine.q_row_begin;
  tile.q_rows = combine.q_rows;
  const int slots = combine.slot_end - combine.slot_begin;
  const int64_t slot_rows = int64_t{common.batch} * groups * forward.tile_rows;
  for (int row = threadIdx.x / 32; row < combine.q_rows * pack; row += kThreads / 32) {
    const int64_t first =
        ((int64_t{combine.slot_begin} * common.batch + batch) * groups + blockIdx.y) *
            forward.tile_rows +
        row;
    const float* const slot_lse = forward.partial_lse + first;
    float4 early[kEarlySlots];
    const float* ahead = forward.partial_out + first * columns + lane * 4;
    const bool takes = vectors && lane * 4 < columns;
#pragma unroll
    for (int i = 0; i < kEarlySlots; ++i, ahead += slot_rows * columns) {
      early[i] = float4{};
      if (i < slots && takes) early[i] = *reinterpret_cast<const float4*>(ahead);
    }
    float max = NegativeInfinity();
#pragma unroll 1
    for (int slot = lane; slot < slots; slot += 32) {
      max = LargerOrNan(max, slot_lse[slot * slot_rows]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      max = LargerOrNan(max, __shfl_xor_sync(0xffffffff, max, step));
    }
    if (stopped) return;
    const float safe = max == NegativeInfinity() ? 0.0f : max;
    float sum = 0.0f;
#pragma unroll 1
    for (int slot = lane; slot < slots; slot += 32) sum += expf(slot_lse[slot * slot_rows] - safe);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    const float lse = sum == 0.0f ? NegativeInfinity() : max + logf(sum);
    ForwardRow target(forward, tile, blockIdx.y * pack, batch, row, lse,
                      sum == 0.0f ? 0.0f : 1.0f / sum);
    __syncwarp();  // all lanes have read the previous lse
    for (int begin = 0; begin < columns; begin += 128) {
      const int column = begin + lane * 4;
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int chunk = 0; chunk < slots; chunk += 32) {
        const int slot = chunk + lane;
        const float lane_weight = slot < slots ? expf(slot_lse[slot * slot_rows] - safe) : 0.0f;
        const float* source = forward.partial_out + (first + chunk * slot_rows) * columns + column;
        const int count = min(slots - chunk, 32);
        int i = 0;
        if (begin == 0 && chunk == 0 && vectors) {
#pragma unroll
          for (; i < kEarlySlots; ++i) {
            const float weight = __shfl_sync(0xffffffff, lane_weight, i);
            x[0] = fmaf(weight, early[i].x, x[0]);
            x[1] = fmaf(weight, early[i].y, x[1]);
            x[2] = fmaf(weight, early[i].z, x[2]);
            x[3] = fmaf(weight, early[i].w, x[3]);
          }
          source += kEarlySlots * slot_rows * columns;
        }
#pragma unroll 8
        for (; i < count; ++i, source += slot_rows * columns) {
          const float weight = __shfl_sync(0xffffffff, lane_weight, i);
          alignas(16) float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (!vectors) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (column + j < columns) part[j] = source[j];
            }
          } else if (column < columns) {
            *reinterpret_cast<float4*>(part) = *reinterpret_cast<const float4*>(source);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = fmaf(weight, part[j], x[j]);
        }
      }
      target.template Store2<T>(column, x[0], x[1]);
      target.template Store2<T>(column + 2, x[2], x[3]);
    }
    if (lane == 0) target.StoreLse();
  }
}

struct MergeParams {
  MergePart parts[kMaxMergeParts];
  int count;
  float* lse;
  const float* sinks;  // null: none
  int64_t batch;
  int64_t rows;
  int num_heads;
  int columns;
};

// One warp per (batch, row, head). `out` and lse may alias the memory of one of the parts: the
// thread that writes an element of out has read it before, and all lanes read lse before it is
// written.
template <typename Out>
__global__ void merge_partials(const __grid_constant__ MergeParams params, Out* out) {
  const int lane = threadIdx.x & 31;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const int64_t count = params.batch * params.rows * params.num_heads;
  for (int64_t index = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
       index < count; index += warps) {
    const int64_t head = index % params.num_heads;
    const int64_t row = index / params.num_heads % params.rows;
    const int64_t batch = index / params.num_heads / params.rows;
    const int64_t at = (batch * params.num_heads + head) * params.rows + row;
    const float sink = params.sinks == nullptr ? NegativeInfinity() : params.sinks[head];
    float max = sink;
    for (int part = 0; part < params.count; ++part) {
      const float lse = params.parts[part].lse[at];
      max = lse > max || lse != lse ? lse : max;
    }
    const float safe = max == NegativeInfinity() ? 0.0f : max;
    float sum = sink == NegativeInfinity() ? 0.0f : expf(sink - safe);
    for (int part = 0; part < params.count; ++part) {
      const float lse = params.parts[part].lse[at];
      if (lse != NegativeInfinity()) sum += expf(lse - safe);
    }
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int column = lane; column < params.columns; column += 32) {
      const int64_t element = index * params.columns + column;
      float x = 0.0f;
      for (int part = 0; part < params.count; ++part) {
        const float lse = params.parts[part].lse[at];
        if (lse == NegativeInfinity()) continue;
        x = fmaf(expf(lse - safe) * scale, params.parts[part].out[element], x);
      }
      out[element] = FromFloat<Out>(x);
    }
    __syncwarp();
    if (lane == 0) params.lse[at] = sum == 0.0f ? NegativeInfinity() : max + logf(sum);
  }
}

// Copies `unit` bytes at a time; all sizes and addresses are multiples of `unit`.
template <typename Unit>
__global__ void copy_runs(char* __restrict__ target, const char* __restrict__ source, int64_t runs,
                          int64_t run_units, int64_t source_pitch, int64_t target_pitch) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < runs * run_units;
       i += step) {
    const int64_t run = i / run_units;
    const int64_t unit = i % run_units;
    reinterpret_cast<Unit*>(target + run * target_pitch)[unit] =
        reinterpret_cast<const Unit*>(source + run * source_pitch)[unit];
  }
}

template <typename Unit>
cudaError_t Copy(const CopyCall& call, cudaStream_t stream) {
  const int64_t run_units = call.run_bytes / static_cast<int64_t>(sizeof(Unit));
  copy_runs<Unit><<<BlocksFor(call.runs * run_units), kThreads, 0, stream>>>(
      static_cast<char*>(call.target), static_cast<const char*>(call.source), call.runs, run_units,
      call.source_pitch, call.target_pitch);
  return cudaGetLastError();
}

template <typename Out>
cudaError_t Merge(const MergeParams& params, void* out, cudaStream_t stream) {
  const int64_t count = params.batch * params.rows * params.num_heads;
  merge_partials<Out>
      <<<BlocksFor(count * 32), kThreads, 0, stream>>>(params, static_cast<Out*>(out));
  return cudaGetLastError();
}

bool InVectors(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T, typename Out>
cudaError_t DeltaOf(const DeltaCall& call, cudaStream_t stream) {
  const AttentionProblem& problem = *call.problem;
  const int64_t count = problem.batch * call.q_rows * problem.num_heads;
  const int64_t dq_count = call.dq_acc == nullptr ? 0 : DqElements(problem, call.q_rows);
  const bool in_vectors = InVectors(call.dq_acc) && dq_count % 4 == 0;
  const auto zero_dq = [&] {
    return dq_count == 0 ? cudaSuccess : cudaMemsetAsync(call.dq_acc, 0, 4 * dq_count, stream);
  };
  if constexpr (sizeof(T) == 2) {
    const int64_t columns = problem.head_dim_v;
    if (count > 0 && count <= std::numeric_limits<int32_t>::max() && columns % 8 == 0 &&
        columns <= 256 && InVectors(call.out) && InVectors(call.dout)) {
      const int lanes = columns <= 64 ? 8 : columns <= 128 ? 16 : 32;
      attention_delta_vectors<T, Out><<<BlocksFor(count * lanes), kThreads, 0, stream>>>(
          static_cast<const Out*>(call.out), static_cast<const T*>(call.dout), call.delta,
          call.dlse, call.lse, static_cast<uint32_t>(count), static_cast<uint32_t>(call.q_rows),
          static_cast<uint32_t>(problem.num_heads), static_cast<int>(columns), lanes,
          reinterpret_cast<float4*>(call.dq_acc), in_vectors ? dq_count / 4 : 0);
      const cudaError_t error = cudaGetLastError();
      return error != cudaSuccess || in_vectors ? error : zero_dq();
    }
  }
  const cudaError_t error = zero_dq();
  if (error != cudaSuccess || count == 0) return error;
  attention_delta<T, Out><<<BlocksFor(count * 32), kThreads, 0, stream>>>(
      static_cast<const Out*>(call.out), static_cast<const T*>(call.dout), call.delta, call.dlse,
      call.lse, problem.batch, call.q_rows, static_cast<int>(problem.num_heads),
      static_cast<int>(problem.head_dim_v));
  return cudaGetLastError();
}

template <typename T>
cudaError_t Delta(const DeltaCall& call, cudaStream_t stream) {
  const bool rounded = call.problem->out_dtype() == call.problem->dtype;
  return rounded ? DeltaOf<T, T>(call, stream) : DeltaOf<T, float>(call, stream);
}

template <typename T>
cudaError_t Convert(const ConvertCall& call, cudaStream_t stream) {
  convert_from_fp32<T><<<BlocksFor((call.count + 3) / 4 / kConvertBatch), kThreads, 0, stream>>>(
      static_cast<T*>(call.target), call.source, call.count);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDelta(const DeltaCall& call, cudaStream_t stream) {
  switch (call.problem->dtype) {
    case DType::kFloat32:
      return Delta<float>(call, stream);
    case DType::kBFloat16:
      return Delta<__nv_bfloat16>(call, stream);
    case DType::kFloat16:
      return Delta<__half>(call, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchSinkGradient(const SinkGradientCall& call, cudaStream_t stream) {
  const AttentionProblem& problem = *call.problem;
  sink_gradient<<<static_cast<unsigned>(problem.num_heads), kThreads, 0, stream>>>(
      call.sinks, call.lse, call.delta, call.dsinks, problem.batch, call.q_rows);
  return cudaGetLastError();
}

cudaError_t LaunchAdd(const AddCall& call, cudaStream_t stream) {
  if (call.count == 0) return cudaSuccess;
  add_fp32<<<BlocksFor((call.count + 3) / 4), kThreads, 0, stream>>>(call.target, call.source,
                                                                     call.count);
  return cudaGetLastError();
}

cudaError_t LaunchConvert(const ConvertCall& call, cudaStream_t stream) {
  if (call.count == 0) return cudaSuccess;
  switch (call.dtype) {
    case DType::kFloat32:
      if (call.target == call.source) return cudaSuccess;
      return cudaMemcpyAsync(call.target, call.source, call.count * sizeof(float),
                             cudaMemcpyDeviceToDevice, stream);
    case DType::kBFloat16:
      return Convert<__nv_bfloat16>(call, stream);
    case DType::kFloat16:
      return Convert<__half>(call, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchMerge(const MergeCall& call, cudaStream_t stream) {
  const AttentionProblem& problem = *call.problem;
  if (call.parts.empty() || call.parts.size() > kMaxMergeParts) return cudaErrorInvalidValue;
  if (problem.batch * call.q_rows * problem.num_heads == 0) return cudaSuccess;
  MergeParams params;
  std::copy(call.parts.begin(), call.parts.end(), params.parts);
  params.count = static_cast<int>(call.parts.size());
  params.lse = call.lse;
  params.sinks = call.final ? call.sinks : nullptr;
  params.batch = problem.batch;
  params.rows = call.q_rows;
  params.num_heads = static_cast<int>(problem.num_heads);
  params.columns = static_cast<int>(problem.head_dim_v);
  if (!call.final) return Merge<float>(params, call.out_acc, stream);
  switch (problem.out_dtype()) {
    case DType::kFloat32:
      return Merge<float>(params, call.out, stream);
    case DType::kBFloat16:
      return Merge<__nv_bfloat16>(params, call.out, stream);
    case DType::kFloat16:
      return Merge<__half>(params, call.out, stream);
  }
  return cudaErrorInvalidValue;
}

// A kernel instead of the runtime's two-dimensional copy, whose pitch is limited.
cudaError_t LaunchCopy(const CopyCall& call, cudaStream_t stream) {
  if (call.runs == 0 || call.run_bytes == 0) return cudaSuccess;
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(call.target) | reinterpret_cast<uintptr_t>(call.source) |
      static_cast<uint64_t>(call.run_bytes | call.source_pitch | call.target_pitch);
  if (bits % 16 == 0) return Copy<uint4>(call, stream);
  if (bits % 4 == 0) return Copy<uint32_t>(call, stream);
  if (bits % 2 == 0) return Copy<uint16_t>(call, stream);
  return Copy<uint8_t>(call, stream);
}

cudaError_t LaunchCombine(DType dtype, const CombineParams& params, int64_t tile_count,
                          cudaStream_t stream, bool early) {
  const CommonParams& common = params.forward.common;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(tile_count), common.num_heads / params.forward.head_pack,
           static_cast<unsigned>(common.batch));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute beside = {};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &beside;
  config.numAttrs = early ? 1 : 0;
  switch (dtype) {
    case DType::kFloat32:
      return cudaLaunchKernelEx(&config, attention_combine<float>, params);
    case DType::kBFloat16:
      return cudaLaunchKernelEx(&config, attention_combine<__nv_bfloat16>, params);
    case DType::kFloat16:
      return cudaLaunchKernelEx(&config, attention_combine<__half>, params);
  }
  return cudaErrorInvalidValue;
}

std::vector<const void*> ElementwiseKernels() {
  return {reinterpret_cast<const void*>(&attention_delta<float, float>),
          reinterpret_cast<const void*>(&attention_delta<__nv_bfloat16, __nv_bfloat16>),
          reinterpret_cast<const void*>(&attention_delta<__nv_bfloat16, float>),
          reinterpret_cast<const void*>(&attention_delta<__half, __half>),
          reinterpret_cast<const void*>(&attention_delta<__half, float>),
          reinterpret_cast<const void*>(&attention_delta_vectors<__nv_bfloat16, __nv_bfloat16>),
          reinterpret_cast<const void*>(&attention_delta_vectors<__nv_bfloat16, float>),
          reinterpret_cast<const void*>(&attention_delta_vectors<__half, __half>),
          reinterpret_cast<const void*>(&attention_delta_vectors<__half, float>),
          reinterpret_cast<const void*>(&sink_gradient),
          reinterpret_cast<const void*>(&add_fp32),
          reinterpret_cast<const void*>(&convert_from_fp32<__nv_bfloat16>),
          reinterpret_cast<const void*>(&convert_from_fp32<__half>),
          reinterpret_cast<const void*>(&merge_partials<float>),
          reinterpret_cast<const void*>(&merge_partials<__nv_bfloat16>),
          reinterpret_cast<const void*>(&merge_partials<__half>),
          reinterpret_cast<const void*>(&copy_runs<uint4>),
          reinterpret_cast<const void*>(&copy_runs<uint32_t>),
          reinterpret_cast<const void*>(&copy_runs<uint16_t>),
          reinterpret_cast<const void*>(&copy_runs<uint8_t>),
          reinterpret_cast<const void*>(&attention_combine<float>),
          reinterpret_cast<const void*>(&attention_combine<__nv_bfloat16>),
          reinterpret_cast<const void*>(&attention_combine<__half>)};
}

}  // namespace ringattn::worker::cuda
