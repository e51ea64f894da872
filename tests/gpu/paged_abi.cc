// A C interface to the paged kernels for tests/gpu/paged_peers.py (ctypes): one PagedAttention,
// created once and enqueued many times. Every function returns 0, or prints the error and returns 1
// (null for handles).
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <memory>

#include "worker/kernels/cuda/paged/paged_attention.h"

namespace {

using ringattn::DType;
using ringattn::worker::cuda::DeviceInfo;
namespace paged = ringattn::worker::cuda::paged;

bool Failed(const absl::Status& status) {
  if (status.ok()) return false;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return true;
}

}  // namespace

// tests/gpu/paged_peers.py has the same structure.
struct RingattnPagedProblem {
  int32_t dtype, num_heads, num_kv_heads, head_dim, block_tokens, planes;
  int64_t blocks;
  int32_t max_rows, max_q_tokens, max_total_q, max_append_tokens;
  float softmax_scale;
  // Device memory, as paged_attention.h has it.
  void *cache, *step, *rows, *tables, *q, *k, *v, *out, *lse, *workspace;
};

namespace {

struct Arguments {
  paged::CacheShape shape;
  paged::AttentionOptions options;
  paged::BatchClass batch;
  paged::Buffers buffers;
  DeviceInfo device;

  explicit Arguments(const RingattnPagedProblem& p) {
    shape.dtype = static_cast<DType>(p.dtype);
    shape.num_kv_heads = p.num_kv_heads;
    shape.head_dim = shape.head_dim_v = p.head_dim;
    shape.block_tokens = p.block_tokens;
    shape.blocks = p.blocks;
    shape.planes = p.planes;
    options.num_heads = p.num_heads;
    options.softmax_scale = p.softmax_scale;
    batch.max_rows = p.max_rows;
    batch.max_q_tokens = p.max_q_tokens;
    batch.max_total_q = p.max_total_q;
    batch.max_append_tokens = p.max_append_tokens;
    buffers.cache = p.cache;
    buffers.step = static_cast<const paged::PagedStep*>(p.step);
    buffers.rows = static_cast<const paged::PagedRow*>(p.rows);
    buffers.tables = static_cast<const int32_t*>(p.tables);
    buffers.q = p.q;
    buffers.k = p.k;
    buffers.v = p.v;
    buffers.out = p.out;
    buffers.lse = static_cast<float*>(p.lse);
    buffers.workspace = p.workspace;
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) == cudaSuccess) {
      device = {properties.multiProcessorCount, properties.major,
                static_cast<int>(properties.sharedMemPerBlockOptin)};
    }
  }
};

}  // namespace

extern "C" {

int64_t ringattn_paged_workspace_bytes(const RingattnPagedProblem* problem) {
  const Arguments a(*problem);
  return paged::PagedAttention::WorkspaceBytes(a.shape, a.options, a.batch, a.device);
}

void* ringattn_paged_create(const RingattnPagedProblem* problem) {
  const Arguments a(*problem);
  auto attention = paged::PagedAttention::Create(a.shape, a.options, a.batch, a.buffers, a.device);
  if (Failed(attention.status())) return nullptr;
  return attention->release();
}

int ringattn_paged_enqueue(void* attention, void* stream) {
  return Failed(
      static_cast<paged::PagedAttention*>(attention)->Enqueue(static_cast<cudaStream_t>(stream)));
}

void ringattn_paged_release(void* attention) {
  delete static_cast<paged::PagedAttention*>(attention);
}

}  // extern "C"
