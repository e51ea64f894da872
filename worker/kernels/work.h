// The cost of computing one visible pair (i, j) of one query head, in multiply-adds. Kernels report
// progress in this unit, and programs are costed in it.
#ifndef RINGATTN_WORKER_KERNELS_WORK_H_
#define RINGATTN_WORKER_KERNELS_WORK_H_

#include <cstdint>

namespace ringattn::worker {

// The products q.k and p v.
inline int64_t ForwardPairWork(int64_t head_dim, int64_t head_dim_v) {
  return head_dim + head_dim_v;
}

// The products q.k and dout.v again, and those for dq, dk and dv.
inline int64_t BackwardPairWork(int64_t head_dim, int64_t head_dim_v) {
  return 3 * head_dim + 2 * head_dim_v;
}

// The products q.k and dout.v again.
inline int64_t BiasGradientPairWork(int64_t head_dim, int64_t head_dim_v) {
  return head_dim + head_dim_v;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_WORK_H_
