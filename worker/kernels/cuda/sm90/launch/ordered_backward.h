// The ordered backward: variants of the backward kernels with one fixed order of all additions to
// an element of dq, dk and dv. Equal calls give equal bits (AttentionProblem::deterministic).
//
// dq. Key tiles add to a q tile of a head in the order of the plan's table, or in the opposite
// order. Ranges begin at multiples of a tile's rows and are split where the neighbours in that
// order change, so that all q tiles of a range have the same predecessor (QTurn). Each batch row,
// head, q tile and consumer group has a counter with the number of the key tile that added last. A
// lane waits until the counter holds its predecessor's number, and adds. It then waits until the
// addition is complete in global memory (not only read), and stores its number.
//
// dk, dv. If several blocks share a key tile, the packs of its group's heads add one after another,
// with the same kind of counter. Each consumer group adds to separate rows, columns or a separate
// tensor, and has a counter.
//
// Score terms. Segment ids and a mask leave some pairs of tiles empty. These pairs are known only
// when the call runs, and no block adds for them. Once the classes are known (terms_classes.h), a
// kernel walks the key tiles of each q tile. It stores for each pair the preceding nonempty pair,
// by batch row and, if masks differ, by head.
//
// Choice of the order. Blocks that run at the same time should reach a q tile one after another.
// For causal masks and windows this holds if the longest tiles come last and every block walks from
// its first q tile to its last: a block is the first one at the q tile where it begins, and the
// next block reaches that tile one tile's time later. But long blocks at the end leave the other
// multiprocessors idle. The last section of heads (backward_params.h), unless there is only one
// section, therefore runs the longest tiles first and walks from the last q tile to the first.
//
// Absence of deadlocks. A thread block takes a ticket when it starts, and the ticket selects its
// item. All blocks with lower tickets have therefore started, in any order in which the hardware
// starts blocks and with any other work on the GPU. Every wait is for a block with a lower ticket:
// an earlier one in the section's order for dq, and an earlier pack for dk and dv. A started block
// keeps its multiprocessor until it ends (a time slice or a debugger stops whole contexts and
// resumes them). Among the blocks that run, the one with the lowest ticket waits for no other
// block. A block that finds the stop word set takes no ticket, so that every ticket belongs to a
// block that adds.
//
// Counters are zeroed on the stream before each launch. Calls that add to the same tensors run one
// after another on the stream.
//
// Pure except for CallTurns::Place.
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
  std::vector<QTurn> ranges;  // one for each range of the plan
  int32_t query_tiles = 0;    // of all of q's pieces
};

// Splits the plan's ranges as described above and returns their predecessors. REQUIRES: ranges
// begin at multiples of `tile_rows` rows of their pieces.
BackwardTurns TakeTurns(const std::vector<Piece>& q_pieces, int32_t tile_rows, BackwardPlan& plan);

struct QueryVisits {
  std::vector<int32_t> begins;  // first entry of each q tile in `visits`, then their number
  std::vector<QVisit> visits;   // in the table's order
};

// Returns the visits of a plan that TakeTurns has split. REQUIRES: the number of its pairs
// (call_terms.h) fits int32.
QueryVisits VisitsOf(const BackwardPlan& plan, const BackwardTurns& turns, int32_t tile_rows);

// The turns of one call: their table, and the counters in scratch memory. A value type. Without
// Init it represents a call without turns. Const methods may run concurrently.
class CallTurns {
 public:
  // Splits the ranges of `plan`. `params` holds the fields that are set before the tables are
  // placed. Returns RESOURCE_EXHAUSTED for more pairs than the tables can count.
  absl::Status Init(const BackwardCall& call, int32_t tile_rows, const BackwardKernelParams& params,
                    BackwardPlan& plan);

  bool any() const { return any_; }
  int64_t table_bytes() const { return table_bytes_; }      // multiples of 256
  int64_t scratch_bytes() const { return scratch_bytes_; }  // multiples of 256

  // `tables` and `scratch` are the addresses of this call's tables and scratch memory, 256-byte
  // aligned. Place zeroes the counters on the stream. Returns INTERNAL with CUDA's text.
  void WriteTables(void* tables) const;
  void DropTables();
  absl::Status Place(const void* tables, void* scratch, cudaStream_t stream,
                     TurnParams& turns) const;

 private:
  bool any_ = false;
  TurnParams params_;  // without addresses
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
