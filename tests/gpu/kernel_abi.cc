// A C interface to the CUDA kernels for tests/gpu/kernel_speed.py (ctypes): one
// dense problem, one document, prepared once and started many times, by the kernel family that
// $RINGATTN_KERNEL_FAMILY names or by the first that can; its forward in e4m3 where
// $RINGATTN_COMPUTE_DTYPE is fp8_e4m3, its backward deterministic where $RINGATTN_DETERMINISTIC is
// not empty. Every function returns 0 or prints the error and returns 1 (null for handles).
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "worker/kernels/cuda/cuda_kernels.h"

namespace {

using ringattn::Band;
using ringattn::DType;
using ringattn::Piece;
using ringattn::worker::AttentionProblem;
using ringattn::worker::KvBlock;

bool Failed(const absl::Status& status) {
  if (status.ok()) return false;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return true;
}

// A prepared kernel with its tables on the device.
class ReadyKernel {
 public:
  ~ReadyKernel() {
    cudaFree(tables_);
    cudaFree(scratch_);
  }
  bool Init(absl::StatusOr<std::unique_ptr<ringattn::worker::cuda::PreparedKernel>> prepared) {
    if (Failed(prepared.status())) return false;
    kernel_ = *std::move(prepared);
    std::vector<char> tables(kernel_->table_bytes());
    if (cudaMalloc(&tables_, tables.size() + 1) != cudaSuccess ||
        cudaMalloc(&scratch_, kernel_->scratch_bytes() + 1) != cudaSuccess ||
        Failed(kernel_->PlaceScratch(scratch_))) {
      return false;
    }
    kernel_->WriteTables(tables.data());
    kernel_->DropTables();
    return cudaMemcpy(tables_, tables.data(), tables.size(), cudaMemcpyHostToDevice) == cudaSuccess;
  }
  bool stores_key_gradients() const { return kernel_->stores_key_gradients(); }
  // False of one that was never initialized.
  bool ready() const { return kernel_ != nullptr; }
  int Launch(cudaStream_t stream) const {
    return Failed(kernel_->Launch({stream, tables_, scratch_, nullptr}));
  }

 private:
  std::unique_ptr<ringattn::worker::cuda::PreparedKernel> kernel_;
  void* tables_ = nullptr;
  void* scratch_ = nullptr;
};
// Score terms and row terms, of one document; null or 0: none. tests/gpu/term_rows.py has the
// Score terms and what rows have, of one document; null or 0: none. tests/gpu/term_rows.py has the
// same structure.
struct Terms {
  const float* slopes;         // host, [heads]
  const void* bias;            // device, dtype, [bias_heads, q_rows, kv_rows]
  void* dbias;                 // as bias; null if not requested
  const uint8_t* mask;         // device, bits, [q_rows, kv_rows / 8 rounded up]
  const int32_t* q_segments;   // device, [batch, q_rows]
  const int32_t* kv_segments;  // device, [batch, kv_rows]
  uint64_t seed;               // of dropout
  uint32_t threshold;          // of dropout: rate times 65536
  int32_t bias_heads;          // 1 or all
  const float* sinks;          // device, [heads]
  float* dsinks;               // as sinks, with sinks
  const float* dlse;           // device, [batch, heads, q_rows]
  int32_t fp32_results;  // out and the gradients are fp32; dq_out, dk_out, dv_out are not used
};

struct Handle {
  AttentionProblem problem;
  ReadyKernel forward;
  ReadyKernel backward;
  ReadyKernel zero_dbias;
  ReadyKernel bias_gradient;
  void* dbias = nullptr;
  int64_t dbias_bytes = 0;
  const float *sinks = nullptr, *dlse = nullptr, *lse = nullptr;
  float* dsinks = nullptr;
  int64_t q_rows = 0;
  int64_t kv_rows = 0;
  void *out = nullptr, *dout = nullptr;
  float *delta = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  void *dq_out = nullptr, *dk_out = nullptr, *dv_out = nullptr;
};

void SetTerms(const Terms& terms, int64_t heads, int64_t q_rows, int64_t kv_rows,
              AttentionProblem& problem) {
  ringattn::worker::ScoreTerms& target = problem.terms;
  target.shifts = {kv_rows - q_rows};
  target.columns = kv_rows;
  if (terms.slopes != nullptr) target.alibi_slopes.assign(terms.slopes, terms.slopes + heads);
  if (terms.bias != nullptr) {
    target.bias =
        ringattn::BiasForm{.per_head = terms.bias_heads > 1, .gradient = terms.dbias != nullptr};
  }
  if (terms.mask != nullptr) target.mask = ringattn::MaskForm{.bits = true};
  target.segment_ids = terms.q_segments != nullptr;
  target.dropout = {.threshold = terms.threshold, .seed = terms.seed};
}

int ZeroDbias(const Handle& handle, cudaStream_t stream) {
  if (handle.zero_dbias.ready()) return handle.zero_dbias.Launch(stream);
  return Failed(ringattn::worker::cuda::StartZero({handle.dbias, handle.dbias_bytes}, stream));
}

}  // namespace

extern "C" {

// dtype: 0 fp32, 1 bf16, 2 fp16. All tensors device memory, layouts as in
// attention_kernel.h; the backward's may be null. dq, dk, dv are fp32, *_out dtype. `terms` may be
// null, and need not outlive the call but for its device memory.
void* ringattn_prepare_terms(const Terms* terms, int dtype, int64_t batch, int64_t q_rows,
                             int64_t kv_rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t head_dim_v, float scale, float softcap, int causal,
                             int64_t window_left, void* q, void* k, void* v, void* out, float* lse,
                             void* dout, float* delta, float* dq, float* dk, float* dv,
                             void* dq_out, void* dk_out, void* dv_out) {
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
  const char* const compute = std::getenv("RINGATTN_COMPUTE_DTYPE");
  if (compute != nullptr && std::string_view(compute) == "fp8_e4m3") {
    problem.compute = ringattn::ComputeDType::kFloat8E4M3;
  }
  const char* const deterministic = std::getenv("RINGATTN_DETERMINISTIC");
  problem.deterministic = deterministic != nullptr && *deterministic != 0;
  Band band;
  if (causal) band.upper = kv_rows - q_rows;
  if (window_left >= 0) band.lower = kv_rows - q_rows - window_left;
  problem.bands = {band};
  ringattn::worker::TermOperands operands;
  if (terms != nullptr) {
    SetTerms(*terms, heads, q_rows, kv_rows, problem);
    operands = {terms->bias, terms->mask, terms->q_segments};
    problem.fp32_results = terms->fp32_results != 0;
    handle->sinks = terms->sinks;
    handle->dsinks = terms->dsinks;
    handle->dlse = terms->dlse;
  }
  handle->q_rows = q_rows;
  handle->kv_rows = kv_rows;
  handle->out = out;
  handle->lse = lse;
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
  const auto info = ringattn::worker::cuda::QueryDevice(device);
  if (Failed(info.status())) return nullptr;
  if (Failed(ringattn::worker::cuda::LoadKernels(*info))) return nullptr;
  // Forced by the environment, for comparisons of families on one problem.
  ringattn::worker::cuda::KernelTuning tuning;
  if (const char* family = std::getenv("RINGATTN_KERNEL_FAMILY")) tuning.family = family;

  KvBlock block;
  block.rows = kv_rows;
  block.pieces = {Piece{0, kv_rows, 0, 0, 1}};
  block.k = k;
  block.v = v;
  block.dk = dk;
  block.dv = dv;
  if (!problem.fp32_results) {
    block.dk_out = dk_out;
    block.dv_out = dv_out;
  }
  if (terms != nullptr) block.segment_ids = terms->kv_segments;
  ringattn::worker::ForwardCall forward;
  forward.problem = &problem;
  forward.q_rows = q_rows;
  forward.q_pieces = {Piece{0, q_rows, 0, 0, 1}};
  forward.q = q;
  forward.blocks = {block};
  forward.lse = lse;
  forward.out = out;
  forward.terms = operands;
  forward.sinks = handle->sinks;
  forward.initial = forward.final = true;
  if (!handle->forward.Init(ringattn::worker::cuda::PrepareForward(forward, *info, tuning))) {
    return nullptr;
  }
  if (dout != nullptr) {
    ringattn::worker::BackwardCall backward;
    backward.problem = &problem;
    backward.q_rows = q_rows;
    backward.q_pieces = forward.q_pieces;
    backward.q = q;
    backward.dout = dout;
    backward.lse = lse;
    backward.delta = delta;
    backward.dq_acc = dq;
    backward.blocks = {block};
    backward.terms = operands;
    if (terms == nullptr || terms->dbias == nullptr) {
      if (!handle->backward.Init(
              ringattn::worker::cuda::PrepareBackward(backward, *info, tuning))) {
        return nullptr;
      }
    } else {
      ringattn::worker::BiasGradientCall gradient;
      gradient.problem = &problem;
      gradient.q_rows = q_rows;
      gradient.q_pieces = forward.q_pieces;
      gradient.q = q;
      gradient.dout = dout;
      gradient.lse = lse;
      gradient.delta = delta;
      gradient.blocks = {block};
      gradient.terms = operands;
      gradient.dbias = terms->dbias;
      handle->dbias = terms->dbias;
      handle->dbias_bytes =
          terms->bias_heads * q_rows * kv_rows * ringattn::ElementBytes(problem.dtype);
      auto zero =
          ringattn::worker::cuda::PrepareZero({handle->dbias, handle->dbias_bytes}, {&gradient});
      if (zero != nullptr && !handle->zero_dbias.Init(std::move(zero))) return nullptr;
      auto both = ringattn::worker::cuda::PrepareGradients(backward, gradient, *info, tuning);
      if (Failed(both.status())) return nullptr;
      if (both->backward == nullptr) {
        auto first = ringattn::worker::cuda::PrepareBackward(backward, *info, tuning);
        auto second = ringattn::worker::cuda::PrepareBiasGradient(gradient, *info, tuning);
        if (Failed(first.status()) || Failed(second.status())) return nullptr;
        *both = {*std::move(first), *std::move(second)};
      }
      if (!handle->backward.Init(std::move(both->backward)) ||
          !handle->bias_gradient.Init(std::move(both->bias_gradient))) {
        return nullptr;
      }
    }
  }
  return handle.release();
}

void* ringattn_prepare(int dtype, int64_t batch, int64_t q_rows, int64_t kv_rows, int64_t heads,
                       int64_t kv_heads, int64_t head_dim, int64_t head_dim_v, float scale,
                       float softcap, int causal, int64_t window_left, void* q, void* k, void* v,
                       void* out, float* lse, void* dout, float* delta, float* dq, float* dk,
                       float* dv, void* dq_out, void* dk_out, void* dv_out) {
  return ringattn_prepare_terms(nullptr, dtype, batch, q_rows, kv_rows, heads, kv_heads, head_dim,
                                head_dim_v, scale, softcap, causal, window_left, q, k, v, out, lse,
                                dout, delta, dq, dk, dv, dq_out, dk_out, dv_out);
}

int ringattn_forward(void* opaque, cudaStream_t stream) {
  return static_cast<Handle*>(opaque)->forward.Launch(stream);
}

// The main kernel alone; gradients accumulate.
int ringattn_backward_kernel(void* opaque, cudaStream_t stream) {
  return static_cast<Handle*>(opaque)->backward.Launch(stream);
}

// Everything that a backward needs after a forward: delta, zeroed accumulators, the sinks'
// gradient, the main kernel, the bias's gradient where it is asked for, conversion to the output
// dtype; of dk and dv where the kernel does not store them.
int ringattn_backward(void* opaque, cudaStream_t stream) {
  using namespace ringattn::worker::cuda;
  Handle* handle = static_cast<Handle*>(opaque);
  const AttentionProblem& p = handle->problem;
  const int64_t dq_count = ringattn::worker::DqElements(p, handle->q_rows);
  const int64_t dk_count = p.batch * handle->kv_rows * p.num_kv_heads * p.head_dim;
  const int64_t dv_count = p.batch * handle->kv_rows * p.num_kv_heads * p.head_dim_v;
  const bool added = !handle->backward.stores_key_gradients();
  const bool rounded = !p.fp32_results;
  return Failed(
             StartDelta({&p, handle->q_rows, handle->out, handle->dout, handle->delta, handle->dlse,
                         handle->dlse != nullptr ? handle->lse : nullptr, handle->dq},
                        stream)) ||
         (handle->sinks != nullptr &&
          Failed(StartSinkGradient(
              {&p, handle->q_rows, handle->sinks, handle->lse, handle->delta, handle->dsinks},
              stream))) ||
         (added && Failed(StartZero({handle->dk, dk_count * 4}, stream))) ||
         (added && Failed(StartZero({handle->dv, dv_count * 4}, stream))) ||
         (handle->dbias != nullptr && ZeroDbias(*handle, stream) != 0) ||
         ringattn_backward_kernel(opaque, stream) != 0 ||
         (handle->dbias != nullptr && handle->bias_gradient.Launch(stream) != 0) ||
         (rounded &&
          Failed(StartConvert({p.dtype, handle->dq_out, handle->dq, dq_count}, stream))) ||
         (rounded && added &&
          (Failed(StartConvert({p.dtype, handle->dk_out, handle->dk, dk_count}, stream)) ||
           Failed(StartConvert({p.dtype, handle->dv_out, handle->dv, dv_count}, stream))));
}

void ringattn_release(void* opaque) { delete static_cast<Handle*>(opaque); }

}  // extern "C"
