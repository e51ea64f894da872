// The operands of a forward in e4m3 on the processor: rounded to what e4m3 holds
// (worker/kernels/e4m3.h), in fp32, so that the fp32 tile operations multiply exactly what a tensor
// core would.
#ifndef RINGATTN_WORKER_KERNELS_CPU_FLOAT8_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CPU_FLOAT8_ROWS_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/workspace/thread_pool.h"

namespace ringattn::worker::cpu {

// The e4m3 operands of one call, which must outlive it. Immutable after FindScales, so any
// thread may use it.
class Float8Rows {
 public:
  enum Tensor { kQ, kK, kV };

  explicit Float8Rows(const ForwardCall& call)
      : call_(call), any_(call.problem->compute == ComputeDType::kFloat8E4M3) {}

  // Whether the call is one in e4m3; the other members are of such calls alone.
  bool any() const { return any_; }

  // Looks at all rows in pieces.
  void FindScales(ThreadPool& pool);

  // The same rows, rounded, in `buffer` [rows, cols].
  SourceRows Rounded(Tensor tensor, int64_t batch, int64_t kv_head, const SourceRows& source,
                     float* buffer) const;
  // values[0, count) of a row of that head, in place.
  void Round(Tensor tensor, int64_t batch, int64_t kv_head, float* values, int64_t count) const;
  // Columns [begin, end) of probabilities, in place.
  static void RoundProbabilities(float* values, int begin, int end);

 private:
  int ExponentOf(Tensor tensor, int64_t batch, int64_t kv_head) const;
  float LargestOf(Tensor tensor, int64_t batch, int64_t kv_head) const;

  const ForwardCall& call_;
  const bool any_;
  std::vector<int> exponents_;  // [tensor][batch][kv_head]
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_FLOAT8_ROWS_H_
