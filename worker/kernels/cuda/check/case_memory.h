// What a case's run has in device memory: of a shard of keys, of a rank's queries, and of the score
// terms of either.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_CASE_MEMORY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_CASE_MEMORY_H_

#include <cstdint>

#include "common/attention/tensors.h"
#include "common/layout/shard_plan.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/score_terms.h"

namespace ringattn::worker::cuda::check {

// A shard of keys and values.
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

// A shard's part of a bias and a mask, and where the bias's gradient goes.
struct PairMemory {
  // `rows`: the shard's, of queries or of keys as plan.pair_axis states.
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

// A rank's rows of the score terms' tensors.
struct TermMemory {
  TermMemory(const AttentionSpec& spec, int64_t rows)
      : pairs(spec, ShardPlan(), rows),
        q_ids(PairMemory::BytesOf(spec, ShardPlan(), TensorId::kQSegmentIds, rows)) {}
  // With the pairs of this rank's queries, or of a shard of keys.
  TermOperands OperandsOf(const PairMemory& of) const {
    return {of.bias.get(), of.mask.get<uint8_t>(), q_ids.get<int32_t>()};
  }
  PairMemory pairs;
  Buffer q_ids;
};

// One rank's rows of q and of what belongs to them.
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
