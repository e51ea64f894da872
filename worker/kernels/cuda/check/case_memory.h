// Device buffers of one test case: one key shard, one rank's queries, and the score-term tensors of
// either.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_CASE_MEMORY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_CASE_MEMORY_H_

#include <cstdint>

#include "common/attention/tensors.h"
#include "common/layout/shard_plan.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/score_terms.h"

namespace ringattn::worker::cuda::check {

// The keys and values of a shard.
struct KvMemory {
  KvMemory(int64_t k_count, int64_t v_count, int64_t element, int64_t ids_count)
      : k(k_count * element),
        v(v_count * element),
        dk(k_count * 4),
        dv(v_count * 4),
        dk_out(k_count * element),
        dv_out(v_count * element),
        ids(ids_count * 4) {}
  Buffer k, v, dk, dv, dk_out, dv_out, ids;
};

// A shard's part of a bias and a mask, and the buffer for the bias's gradient.
struct PairMemory {
  // `rows`: number of rows of the shard, queries or keys according to plan.pair_axis.
  PairMemory(const AttentionSpec& spec, const ShardPlan& plan, int64_t rows)
      : bias(BytesOf(spec, plan, TensorId::kBias, rows)),
        mask(BytesOf(spec, plan, TensorId::kMask, rows)),
        dbias(BytesOf(spec, plan, TensorId::kDbias, rows)) {}
  static int64_t BytesOf(const AttentionSpec& spec, const ShardPlan& plan, TensorId id,
                         int64_t rows) {
    return InfoOf(id).is_present(spec) ? LayoutOf(spec, plan, id).ShardBytes(rows) : 0;
  }
  Buffer bias, mask, dbias;
};

// A rank's rows of the score-term tensors.
struct TermMemory {
  TermMemory(const AttentionSpec& spec, int64_t rows)
      : pairs(spec, ShardPlan(), rows),
        q_ids(PairMemory::BytesOf(spec, ShardPlan(), TensorId::kQSegmentIds, rows)) {}
  // Returns the operands with the pairs of this rank's queries, or of a key shard.
  TermOperands OperandsOf(const PairMemory& of) const {
    return {of.bias.get(), of.mask.get<uint8_t>(), q_ids.get<int32_t>()};
  }
  PairMemory pairs;
  Buffer q_ids;
};

// One rank's rows of q and of the tensors with the same rows.
struct QueryMemory {
  QueryMemory(int64_t rows, int64_t d, int64_t dv, int64_t element)
      : q(rows * d * element),
        dout(rows * dv * element),
        out_acc(rows * dv * 4),
        out(rows * dv * element),
        lse(rows * 4),
        delta(rows * 4),
        dq_acc(rows * d * 4),
        dq(rows * d * element) {}
  bool GuardsIntact() const {
    for (const Buffer* buffer : {&out, &out_acc, &lse, &delta, &dq_acc, &dq}) {
      if (!buffer->GuardsIntact()) return false;
    }
    return true;
  }
  Buffer q, dout, out_acc, out, lse, delta, dq_acc, dq;
};

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_CASE_MEMORY_H_
