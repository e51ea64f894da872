// Whether a bias gradient covers exactly the pairs of a backward call, so that one kernel may
// compute both.
#ifndef RINGATTN_WORKER_KERNELS_SAME_OPERANDS_H_
#define RINGATTN_WORKER_KERNELS_SAME_OPERANDS_H_

#include <algorithm>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

inline bool SameOperands(const BackwardCall& a, const BiasGradientCall& b) {
  return a.problem == b.problem && a.q_rows == b.q_rows && a.q_pieces == b.q_pieces && a.q == b.q &&
         a.dout == b.dout && a.lse == b.lse && a.delta == b.delta && a.terms.bias == b.terms.bias &&
         a.terms.mask == b.terms.mask && a.terms.q_segment_ids == b.terms.q_segment_ids &&
         std::equal(a.blocks.begin(), a.blocks.end(), b.blocks.begin(), b.blocks.end(),
                    [](const KvBlock& x, const KvBlock& y) {
                      return x.rows == y.rows && x.pieces == y.pieces && x.k == y.k && x.v == y.v &&
                             x.segment_ids == y.segment_ids;
                    });
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_SAME_OPERANDS_H_
