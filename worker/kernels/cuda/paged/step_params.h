// Parameters that all paged kernels share. Plain structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_STEP_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_STEP_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/paged/paged_rows.h"
#include "worker/kernels/cuda/paged/work_split.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::paged {

// The step's description in device memory, and the geometry of the cache.
struct StepParams {
  const PagedStep* step = nullptr;
  const PagedRow* rows = nullptr;
  const int32_t* tables = nullptr;
  int32_t max_rows = 0;
  int32_t block_shift = 0;  // log2 of block_tokens
  // blocks * block_tokens: tokens of a plane, and the first token that does not exist.
  int32_t plane_tokens = 0;
};

// How a launch that splits keys divides its work. A thread block's index is column * packs + pack,
// where a pack is `ForwardParams::head_pack` query heads of one kv head.
struct SplitParams {
  UnitRule rule;
  int32_t max_columns = 1;  // the launch has max_columns * packs thread blocks
  int32_t packs = 1;
  // All zero between launches: [TicketsOf(...) * packs] how many pieces of a unit are done, or
  // groups if its pieces are merged in groups; [SlotsOf(max_columns) * packs] how many of a group.
  uint32_t* tickets = nullptr;
  uint32_t* group_tickets = nullptr;
};

// As CompiledMask.
template <bool kParted>
RINGATTN_PAGED_INLINE SplitParams CompiledSplit(const SplitParams& split) {
  SplitParams compiled = split;
  compiled.rule.mask = CompiledMask<kParted>(split.rule.mask);
  return compiled;
}

// The append of one step. A token's bytes are the new entry's; a row's are the distance of entries
// in the cache.
struct AppendParams {
  StepParams step;
  char* cache = nullptr;
  const char* k = nullptr;
  const char* v = nullptr;
  int64_t k_plane_bytes = 0;
  int64_t v_plane_bytes = 0;
  int64_t k_row_bytes = 0;
  int64_t v_row_bytes = 0;
  int32_t k_token_bytes = 0;
  int32_t v_token_bytes = 0;
};

// The append of one step whose description and tensors are fetched first (FetchedInput).
struct FetchParams {
  AppendParams append;
  const char* source = nullptr;
  char* target = nullptr;
  int32_t bytes = 0;
  bool appends = true;  // false: fetches alone
};

// Tells the host that a launch has ended: the last thread block stores PagedStep::number.
struct DoneSignal {
  uint32_t* counter = nullptr;  // zero between launches: thread blocks that have ended
  uint32_t* word = nullptr;     // null: no signal
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_STEP_PARAMS_H_
