// The products of a backward block pair by pair, where the quick ones would be wrong.
#ifndef RINGATTN_WORKER_KERNELS_CPU_NONFINITE_GRADIENTS_H_
#define RINGATTN_WORKER_KERNELS_CPU_NONFINITE_GRADIENTS_H_

#include <cstdint>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/backward_block.h"

namespace ringattn::worker::cpu {

// Refers to what a pass has.
class NonfiniteGradients {
 public:
  //   key_tile    columns of a block's tiles
  //   cols, cols_v  padded columns of k and v
  NonfiniteGradients(const BackwardCall& the_call, const Workspace& the_workspace,
                     const TileOps& the_ops, const ScorePass& the_terms, int the_key_tile,
                     int the_cols, int the_cols_v)
      : call(the_call),
        problem(*the_call.problem),
        workspace(the_workspace),
        ops(the_ops),
        terms(the_terms),
        key_tile(the_key_tile),
        cols(the_cols),
        cols_v(the_cols_v) {}

  // The block's rows of q or dout.
  SourceRows BlockRows(const KeyTask& task, const QueryBlock& block, const void* tensor,
                       int dim) const;
  // For blocks with masks and values that are not finite, from p and ds.
  void AddVisibleGradients(KeyTask& task, QueryBlock& block) const;
  // In double, for blocks whose products may not fit fp32.
  void AddWideGradients(KeyTask& task, QueryBlock& block) const;
  // Those of row m's ds, in block.dp, that left fp32's range on their way are done again.
  void MendScoreGradients(const KeyTask& task, const QueryBlock& block, int m) const;

 private:
  struct PairGradient {
    double p, ds;
  };
  bool IsHidden(const QueryBlock& block, int m, int j) const;
  PairGradient GradientOfPair(const KeyTask& task, const QueryBlock& block, int m, int j,
                              const float* q, const float* k, const float* dout,
                              const float* v) const;

  const BackwardCall& call;
  const AttentionProblem& problem;
  const Workspace& workspace;
  const TileOps& ops;
  const ScorePass& terms;
  const int key_tile;
  const int cols;
  const int cols_v;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_NONFINITE_GRADIENTS_H_
