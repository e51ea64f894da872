// A naive fp64 attention on the GPU for the kernel tests: one thread per result
// element, every score kept in memory, no code shared with the kernels. Beside
// each exact result it computes the rounded twin and the magnitude by which
// results are judged (docs/semantics.md), and the floor that fp32 arithmetic may
// lose whatever the dtype (a score's rounding error multiplies its probability).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_REFERENCE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_REFERENCE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ringattn::worker::cuda::reference {

// All pointers are device memory. Inputs are fp64 copies of the rounded inputs.
struct Problem {
  int batch, heads, kv_heads, sq, sk, d, dv, dtype;  // dtype: 0 fp32, 1 bf16, 2 fp16
  double scale, softcap;
  const double *q, *k, *v, *dout;  // [batch, tokens, heads, dim]
  const int *q_document, *k_document;
  const int64_t *q_position, *k_position;
  const int64_t *lower, *upper;  // per document
  double *s, *derivative, *dp;   // [batch, heads, sq, sk]; s = -inf where masked
  double* dp_magnitude;          // sum |dout||v|
  double *lse, *max, *bound, *delta, *delta_magnitude;  // [batch, heads, sq]
};

// An exact result, its rounded twin, its magnitude and its floor.
struct Result {
  double *exact, *twin, *magnitude, *floor;
};

__device__ inline double Round(int dtype, double x) {
  if (dtype == 0) return static_cast<float>(x);
  if (dtype == 1) return __bfloat162float(__float2bfloat16_rn(static_cast<float>(x)));
  return __half2float(__float2half_rn(static_cast<float>(x)));
}

// What fp16 may lose by storing x as a subnormal, in units of 8 u.
__device__ inline double SubnormalLoss(int dtype, double x) {
  if (dtype != 2 || fabs(x) >= 0x1p-14) return 0;
  return fmin(fabs(x), 0x1p-25) / (8 * 0x1p-12);
}
// What fp32 may lose by flushing x to zero, and eight of its roundings.
__device__ inline double Flush(double x) { return fabs(x) < 0x1p-120 ? fabs(x) : 0; }
constexpr double kSlack = 0x1p-21;

__device__ inline int64_t Thread() {
  return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
}

__global__ void Scores(Problem p) {
  const int64_t t = Thread();
  if (t >= int64_t{1} * p.batch * p.heads * p.sq * p.sk) return;
  const int j = t % p.sk;
  const int i = t / p.sk % p.sq;
  const int h = t / p.sk / p.sq % p.heads;
  const int b = t / p.sk / p.sq / p.heads;
  const int hk = h / (p.heads / p.kv_heads);
  const int document = p.q_document[i];
  const int64_t difference = p.k_position[j] - p.q_position[i];
  if (document != p.k_document[j] || difference < p.lower[document] ||
      difference > p.upper[document]) {
    p.s[t] = -INFINITY;
    p.derivative[t] = 0;
    p.dp[t] = 0;
    p.dp_magnitude[t] = 0;
    return;
  }
  const double* q = p.q + ((int64_t{b} * p.sq + i) * p.heads + h) * p.d;
  const double* k = p.k + ((int64_t{b} * p.sk + j) * p.kv_heads + hk) * p.d;
  double s = 0;
  for (int c = 0; c < p.d; ++c) s += q[c] * k[c];
  s *= p.scale;
  p.derivative[t] = 1;
  if (p.softcap > 0) {
    const double x = tanh(s / p.softcap);
    s = p.softcap * x;
    p.derivative[t] = 1 - x * x;
  }
  p.s[t] = s;
  const double* dout = p.dout + ((int64_t{b} * p.sq + i) * p.heads + h) * p.dv;
  const double* v = p.v + ((int64_t{b} * p.sk + j) * p.kv_heads + hk) * p.dv;
  double dp = 0, dp_magnitude = 0;
  for (int c = 0; c < p.dv; ++c) {
    dp += dout[c] * v[c];
    dp_magnitude += fabs(dout[c] * v[c]);
  }
  p.dp[t] = dp;
  p.dp_magnitude[t] = dp_magnitude;
}

__global__ void Rows(Problem p) {
  const int64_t t = Thread();
  if (t >= int64_t{1} * p.batch * p.heads * p.sq) return;
  const int i = t % p.sq;
  const int h = t / p.sq % p.heads;
  const int b = t / p.sq / p.heads;
  const int hk = h / (p.heads / p.kv_heads);
  double max = -INFINITY;
  double bound = 1;
  for (int j = 0; j < p.sk; ++j) {
    const double s = p.s[t * p.sk + j];
    if (s == -INFINITY) continue;
    max = fmax(max, s);
    const double* q = p.q + ((int64_t{b} * p.sq + i) * p.heads + h) * p.d;
    const double* k = p.k + ((int64_t{b} * p.sk + j) * p.kv_heads + hk) * p.d;
    double sum = 0;
    for (int c = 0; c < p.d; ++c) sum += fabs(q[c] * k[c]);
    bound = fmax(bound, fabs(p.scale) * sum);
  }
  double z = 0;
  for (int j = 0; j < p.sk; ++j) {
    if (p.s[t * p.sk + j] != -INFINITY) z += exp(p.s[t * p.sk + j] - max);
  }
  p.max[t] = max;
  p.lse[t] = z == 0 ? -INFINITY : max + log(z);
  p.bound[t] = bound;
}

__device__ inline void Finish(const Problem& p, Result result, int64_t t, double exact, double twin,
                              double magnitude, double floor) {
  result.exact[t] = exact;
  result.twin[t] = Round(p.dtype, twin);
  // A result below fp16's normals may be rounded up as well as down.
  const double loss = p.dtype == 2 && fabs(exact) < 0x1p-14 ? 0x1p-25 / (8 * 0x1p-12) : 0;
  result.magnitude[t] = magnitude + loss;
  result.floor[t] = floor + Flush(exact);
}

// out [batch, sq, heads, dv]
__global__ void Out(Problem p, Result out) {
  const int64_t t = Thread();
  if (t >= int64_t{1} * p.batch * p.sq * p.heads * p.dv) return;
  const int c = t % p.dv;
  const int h = t / p.dv % p.heads;
  const int i = t / p.dv / p.heads % p.sq;
  const int b = t / p.dv / p.heads / p.sq;
  const int hk = h / (p.heads / p.kv_heads);
  const int64_t row = (int64_t{b} * p.heads + h) * p.sq + i;
  double exact = 0, twin = 0, magnitude = 0, floor = 0;
  for (int j = 0; j < p.sk; ++j) {
    const double s = p.s[row * p.sk + j];
    if (s == -INFINITY) continue;
    const double v = p.v[((int64_t{b} * p.sk + j) * p.kv_heads + hk) * p.dv + c];
    const double probability = exp(s - p.lse[row]);
    exact += probability * v;
    const double stored = exp(s - p.max[row]);
    const double normalizer = exp(p.max[row] - p.lse[row]);
    magnitude += (probability + SubnormalLoss(p.dtype, stored) * normalizer) * fabs(v);
    twin += Round(p.dtype, stored) * normalizer * v;
    floor += (kSlack * (1 + p.bound[row]) * probability + Flush(probability)) * fabs(v);
  }
  Finish(p, out, t, exact, twin, magnitude, floor);
}

__global__ void Delta(Problem p, Result out) {
  const int64_t t = Thread();
  if (t >= int64_t{1} * p.batch * p.heads * p.sq) return;
  const int i = t % p.sq;
  const int h = t / p.sq % p.heads;
  const int b = t / p.sq / p.heads;
  const int64_t at = ((int64_t{b} * p.sq + i) * p.heads + h) * p.dv;
  double sum = 0, magnitude = 0;
  for (int c = 0; c < p.dv; ++c) {
    sum += out.exact[at + c] * p.dout[at + c];
    magnitude += fabs(out.exact[at + c] * p.dout[at + c]);
  }
  p.delta[t] = sum;
  p.delta_magnitude[t] = magnitude;
}

__device__ inline double Probability(const Problem& p, int64_t row, int64_t j) {
  const double s = p.s[row * p.sk + j];
  return s == -INFINITY ? 0.0 : exp(s - p.lse[row]);
}

// ds of one pair and what belongs to it.
struct Gradient {
  double ds, magnitude, floor;
};
__device__ inline Gradient GradientOf(const Problem& p, int64_t row, int64_t j,
                                      double probability) {
  const int64_t at = row * p.sk + j;
  const double size = fabs(p.dp[at]) + fabs(p.delta[row]);
  const double ds = probability * (p.dp[at] - p.delta[row]) * p.derivative[at];
  return {
      ds, probability * size + SubnormalLoss(p.dtype, ds),
      kSlack * probability * (p.dp_magnitude[at] + p.delta_magnitude[row] + size * p.bound[row]) +
          Flush(probability) * size};
}

// dq [batch, sq, heads, d]
__global__ void Dq(Problem p, Result dq) {
  const int64_t t = Thread();
  if (t >= int64_t{1} * p.batch * p.sq * p.heads * p.d) return;
  const int c = t % p.d;
  const int h = t / p.d % p.heads;
  const int i = t / p.d / p.heads % p.sq;
  const int b = t / p.d / p.heads / p.sq;
  const int hk = h / (p.heads / p.kv_heads);
  const int64_t row = (int64_t{b} * p.heads + h) * p.sq + i;
  double exact = 0, twin = 0, magnitude = 0, floor = 0;
  for (int j = 0; j < p.sk; ++j) {
    const double probability = Probability(p, row, j);
    if (probability == 0) continue;
    const double k = p.k[((int64_t{b} * p.sk + j) * p.kv_heads + hk) * p.d + c];
    const Gradient g = GradientOf(p, row, j, probability);
    exact += p.scale * g.ds * k;
    twin += p.scale * Round(p.dtype, g.ds) * k;
    magnitude += fabs(p.scale * k) * g.magnitude;
    floor += fabs(p.scale * k) * g.floor;
  }
  Finish(p, dq, t, exact, twin, magnitude, floor);
}

// dk [batch, sk, kv_heads, d] (is_dv = 0) or dv [batch, sk, kv_heads, dv]
__global__ void Dkv(Problem p, Result result, int is_dv) {
  const int64_t t = Thread();
  const int dim = is_dv ? p.dv : p.d;
  if (t >= int64_t{1} * p.batch * p.sk * p.kv_heads * dim) return;
  const int c = t % dim;
  const int hk = t / dim % p.kv_heads;
  const int j = t / dim / p.kv_heads % p.sk;
  const int b = t / dim / p.kv_heads / p.sk;
  const int group = p.heads / p.kv_heads;
  double exact = 0, twin = 0, magnitude = 0, floor = 0;
  for (int h = hk * group; h < (hk + 1) * group; ++h) {
    for (int i = 0; i < p.sq; ++i) {
      const int64_t row = (int64_t{b} * p.heads + h) * p.sq + i;
      const double probability = Probability(p, row, j);
      if (probability == 0) continue;
      const int64_t token = (int64_t{b} * p.sq + i) * p.heads + h;
      if (is_dv) {
        const double dout = p.dout[token * p.dv + c];
        exact += probability * dout;
        twin += Round(p.dtype, probability) * dout;
        magnitude += (probability + SubnormalLoss(p.dtype, probability)) * fabs(dout);
        floor += (kSlack * (1 + p.bound[row]) * probability + Flush(probability)) * fabs(dout);
      } else {
        const double q = p.q[token * p.d + c];
        const Gradient g = GradientOf(p, row, j, probability);
        exact += p.scale * g.ds * q;
        twin += p.scale * Round(p.dtype, g.ds) * q;
        magnitude += fabs(p.scale * q) * g.magnitude;
        floor += fabs(p.scale * q) * g.floor;
      }
    }
  }
  Finish(p, result, t, exact, twin, magnitude, floor);
}

}  // namespace ringattn::worker::cuda::reference

#endif  // RINGATTN_WORKER_KERNELS_CUDA_REFERENCE_CUH_
