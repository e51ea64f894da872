// The tables of calls with score terms: the position of each range of a plan (tile_plan.h) in its
// document. Pure host arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_TERM_TABLE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_TERM_TABLE_H_

#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/term_params.h"
#include "worker/kernels/cuda/plan/tile_plan.h"

namespace ringattn::worker::cuda {

// Returns all parameters except the tables, for a call of `q_rows` queries.
TermParams TermsOf(const AttentionProblem& problem, const TermOperands& operands, int64_t q_rows);

// Returns one entry per range of the plan. REQUIRES: the plan is the call's.
std::vector<TermRange> TermRangesOf(const ForwardCall& call, const ForwardPlan& plan);
std::vector<TermRange> TermRangesOf(const BackwardCall& call, const BackwardPlan& plan);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_TERM_TABLE_H_
