// A C interface to the CUDA kernels for tests/gpu/kernel_speed.py (ctypes): one
// dense problem, one document, prepared once and started many times. Every
// function returns 0 or prints the error and returns 1 (null for handles).
#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>

#include "worker/kernels/cuda/cuda_kernels.h"

namespace {

using ringattn::AttentionProblem;
using ringattn::Band;
using ringattn::DType;
using ringattn::KvBlock;
using ringattn::Piece;

bool Failed(const absl::Status& status) {
  if (status.ok()) return false;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return true;
}

// Buffers that a started call needs, kept between calls.
struct Workspace {
  ~Workspace() {
    cudaFree(device);
    cudaFreeHost(staging);
  }
  bool Allocate(int64_t bytes, int64_t pinned) {
    context.workspace_bytes = bytes;
    context.staging_bytes = pinned;
    if (cudaMalloc(&device, bytes + 1) != cudaSuccess) return false;
    if (cudaMallocHost(&staging, pinned + 1) != cudaSuccess) return false;
    context.workspace = device;
    context.staging = staging;
    return true;
  }
  void* device = nullptr;
  void* staging = nullptr;
  ringattn::cuda::LaunchContext context;
};

struct Handle {
  AttentionProblem problem;
  ringattn::cuda::PreparedForward forward;
  ringattn::cuda::PreparedBackward backward;
  Workspace forward_workspace;
  Workspace backward_workspace;
  int64_t q_rows = 0;
  int64_t kv_rows = 0;
  void *out = nullptr, *dout = nullptr;
  float *delta = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  void *dq_out = nullptr, *dk_out = nullptr, *dv_out = nullptr;
};

}  // namespace

extern "C" {

// dtype: 0 fp32, 1 bf16, 2 fp16. All tensors device memory, layouts as in
// attention_kernel.h; the backward's may be null. dq, dk, dv are fp32, *_out dtype.
void* ringattn_prepare(int dtype, int64_t batch, int64_t q_rows, int64_t kv_rows, int64_t heads,
                       int64_t kv_heads, int64_t head_dim, int64_t head_dim_v, float scale,
                       float softcap, int causal, int64_t window_left, void* q, void* k, void* v,
                       void* out, float* lse, void* dout, float* delta, float* dq, float* dk,
                       float* dv, void* dq_out, void* dk_out, void* dv_out) {
  auto handle = std::make_unique<Handle>();
  AttentionProblem& problem = handle->problem;
  problem.dtype = static_cast<DType>(dtype);
  problem.batch = batch;
  problem.num_heads = heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  problem.softmax_scale = scale;
  problem.softcap = softcap;
  Band band;
  if (causal) band.upper = kv_rows - q_rows;
  if (window_left >= 0) band.lower = kv_rows - q_rows - window_left;
  problem.bands = {band};
  handle->q_rows = q_rows;
  handle->kv_rows = kv_rows;
  handle->out = out;
  handle->dout = dout;
  handle->delta = delta;
  handle->dq = dq;
  handle->dk = dk;
  handle->dv = dv;
  handle->dq_out = dq_out;
  handle->dk_out = dk_out;
  handle->dv_out = dv_out;
  int device = 0;
  cudaGetDevice(&device);
  const auto info = ringattn::cuda::QueryDevice(device);
  if (Failed(info.status())) return nullptr;

  KvBlock block;
  block.rows = kv_rows;
  block.pieces = {Piece{0, kv_rows, 0, 0, 1}};
  block.k = k;
  block.v = v;
  block.dk = dk;
  block.dv = dv;
  ringattn::ForwardCall forward;
  forward.problem = &problem;
  forward.q_rows = q_rows;
  forward.q_pieces = {Piece{0, q_rows, 0, 0, 1}};
  forward.q = q;
  forward.blocks = {block};
  forward.lse = lse;
  forward.out = out;
  forward.initial = forward.final = true;
  auto prepared = ringattn::cuda::PrepareForward(forward, *info);
  if (Failed(prepared.status())) return nullptr;
  handle->forward = *std::move(prepared);
  if (!handle->forward_workspace.Allocate(handle->forward.device_bytes(),
                                          handle->forward.staging_bytes())) {
    return nullptr;
  }
  // Once, as for a ring pass.
  handle->forward.WriteTables(handle->forward_workspace.staging);
  if (cudaMemcpy(handle->forward_workspace.device, handle->forward_workspace.staging,
                 handle->forward.table_bytes(), cudaMemcpyHostToDevice) != cudaSuccess) {
    return nullptr;
  }
  if (dout != nullptr) {
    ringattn::BackwardCall backward;
    backward.problem = &problem;
    backward.q_rows = q_rows;
    backward.q_pieces = forward.q_pieces;
    backward.q = q;
    backward.dout = dout;
    backward.lse = lse;
    backward.delta = delta;
    backward.dq_acc = dq;
    backward.blocks = {block};
    auto prepared_backward = ringattn::cuda::PrepareBackward(backward, *info);
    if (Failed(prepared_backward.status())) return nullptr;
    handle->backward = *std::move(prepared_backward);
    if (!handle->backward_workspace.Allocate(handle->backward.device_bytes(),
                                             handle->backward.staging_bytes())) {
      return nullptr;
    }
  }
  return handle.release();
}

int ringattn_forward(void* opaque, cudaStream_t stream) {
  Handle* handle = static_cast<Handle*>(opaque);
  char* tables = static_cast<char*>(handle->forward_workspace.device);
  return Failed(handle->forward.Launch(
      {stream, tables, tables + handle->forward.table_bytes(), nullptr}));
}

// The main kernel alone; gradients accumulate.
int ringattn_backward_kernel(void* opaque, cudaStream_t stream) {
  Handle* handle = static_cast<Handle*>(opaque);
  handle->backward_workspace.context.stream = stream;
  return Failed(handle->backward.Start(handle->backward_workspace.context));
}

// Everything that a backward needs after a forward: delta, zeroed accumulators,
// the main kernel, conversion to the output dtype.
int ringattn_backward(void* opaque, cudaStream_t stream) {
  using namespace ringattn::cuda;
  Handle* handle = static_cast<Handle*>(opaque);
  const AttentionProblem& p = handle->problem;
  const int64_t dq_count = p.batch * handle->q_rows * p.num_heads * p.head_dim;
  const int64_t dk_count = p.batch * handle->kv_rows * p.num_kv_heads * p.head_dim;
  const int64_t dv_count = p.batch * handle->kv_rows * p.num_kv_heads * p.head_dim_v;
  return Failed(StartDelta({&p, handle->q_rows, handle->out, handle->dout, handle->delta},
                           stream)) ||
         Failed(StartZero({handle->dq, dq_count * 4}, stream)) ||
         Failed(StartZero({handle->dk, dk_count * 4}, stream)) ||
         Failed(StartZero({handle->dv, dv_count * 4}, stream)) ||
         ringattn_backward_kernel(opaque, stream) != 0 ||
         Failed(StartConvert({p.dtype, handle->dq_out, handle->dq, dq_count}, stream)) ||
         Failed(StartConvert({p.dtype, handle->dk_out, handle->dk, dk_count}, stream)) ||
         Failed(StartConvert({p.dtype, handle->dv_out, handle->dv, dv_count}, stream));
}

void ringattn_release(void* opaque) { delete static_cast<Handle*>(opaque); }

}  // extern "C"
