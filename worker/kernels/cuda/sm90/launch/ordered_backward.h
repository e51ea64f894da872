// The ordered backward: the backward kernels once more, with one order of all additions to an
// element of dq, dk and dv, so that equal calls give equal bits (AttentionProblem::deterministic).
//
// dq. Key tiles add to a q tile of a head in the order of the plan's table, or in the opposite one.
// Ranges begin at multiples of a tile's rows and are cut where the neighbours in that order change,
// so that all q tiles of a range have the same one before them (QTurn). A counter per batch row,
// head, q tile and consumer group holds the number of the key tile that added last; the lane that
// adds waits for its predecessor's number, adds, waits until that is complete in global memory
// (not only read), and stores its own.
// dk, dv. Where several blocks share a key tile, packs of its group's heads add one after the
// other, by the same means. Each consumer group has rows, columns or a tensor of its own, and a
// counter.
//
// Score terms. Of pairs of tiles that segment ids or a mask leave empty nobody knows before the
// call runs, and nobody comes there: once the classes are known (terms_classes.h), a kernel goes
// through those that come to each q tile and says of each pair, by batch row and, where masks
// differ, head, who was the last before it.
//
// Which order: blocks that compute at the same time should come to a q tile one after the other.
// With the longest tiles last, and every block going from its first q tile to its last, that is so
// for causal masks and windows: whoever begins at a q tile is its first, the next one comes a
// tile's time later. But long blocks at the end leave the other multiprocessors without work: the
// last section of heads (backward_params.h), unless there is but one, has them first, and goes from
// the last q tile to the first.
//
// Why nobody waits for ever. A thread block takes a ticket when it starts, and its item is the
// ticket's: whoever has a lower one has started, in whatever order the hardware starts blocks, and
// whatever else shares the GPU. Every wait is for blocks with lower tickets: within a section's
// order for dq, for an earlier pack for dk and dv. A started block keeps its multiprocessor until
// it ends (a time slice or a debugger stops whole contexts, and resumes them); of all that have
// started and not ended, that with the lowest ticket waits for nobody. A block that finds the stop
// word set takes no ticket, so that none is given to a block that adds nothing.
//
// Counters are zeroed on the stream ahead of each launch, and calls that add to the same tensors
// follow one another on it.
//
// Pure but for CallTurns::Place.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_ORDERED_BACKWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_ORDERED_BACKWARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

struct BackwardTurns {
  std::vector<QTurn> ranges;  // beside the plan's
  int32_t query_tiles = 0;    // of all of q's pieces
};

// Cuts the plan's ranges as above and says what they wait for.
// REQUIRES: ranges begin at multiples of `tile_rows` rows of their pieces.
BackwardTurns TakeTurns(const std::vector<Piece>& q_pieces, int32_t tile_rows, BackwardPlan& plan);

struct QueryVisits {
  std::vector<int32_t> begins;  // of each q tile's in `visits`, and behind the last
  std::vector<QVisit> visits;   // in the table's order
};

// Of a plan that TakeTurns has cut. REQUIRES: its pairs (call_terms.h) can be counted by int32.
QueryVisits VisitsOf(const BackwardPlan& plan, const BackwardTurns& turns, int32_t tile_rows);

// The turns of one call: their table, and the counters in scratch memory. A value; without Init
// that of a call without turns. Thread-safe for readers.
class CallTurns {
 public:
  // Cuts `plan`, of which `params` has what is set before the tables are placed.
  // RESOURCE_EXHAUSTED for more pairs than tables can count.
  absl::Status Init(const BackwardCall& call, int32_t tile_rows, const BackwardKernelParams& params,
                    BackwardPlan& plan);

  bool any() const { return any_; }
  int64_t table_bytes() const { return table_bytes_; }      // multiples of 256
  int64_t scratch_bytes() const { return scratch_bytes_; }  // likewise

  // `tables` and `scratch` are where this call's lie, 256-byte aligned. Place zeroes the counters
  // on the stream. INTERNAL with CUDA's text.
  void WriteTables(void* tables) const;
  void DropTables();
  absl::Status Place(const void* tables, void* scratch, cudaStream_t stream,
                     TurnParams& turns) const;

 private:
  bool any_ = false;
  TurnParams params_;  // addresses unset
  std::vector<QTurn> ranges_;
  QueryVisits visits_;
  bool has_visits_ = false;
  int64_t begins_offset_ = 0;  // in the tables, bytes
  int64_t visits_offset_ = 0;
  int64_t table_bytes_ = 0;
  int64_t queries_offset_ = 0;  // in the scratch memory, bytes
  int64_t keys_offset_ = 0;
  int64_t pair_turns_offset_ = 0;
  int64_t scratch_bytes_ = 0;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_ORDERED_BACKWARD_H_
