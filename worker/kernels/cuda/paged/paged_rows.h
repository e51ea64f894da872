// The description of one step that the paged kernels read from device memory.
//
// A step is a batch of rows. A row is one sequence that appends entries and asks queries. The host
// writes a PagedStep, an array of PagedRow and the block tables before each launch. A captured
// graph reads them again at each replay, so that one graph serves all steps of a batch class.
// No CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_ROWS_H_

#include <cstdint>

namespace ringattn::worker::cuda::paged {

// Rows of at most so many queries take the decode kernel; the others take the prefill kernel.
inline constexpr int32_t kMaxDecodeQueries = 64;
// Thread blocks that may share the keys of one kv head in a decode.
inline constexpr int32_t kMaxSplits = 256;

// One sequence of a step. The sequence has at most 2^30 entries when attention runs. The last query
// is aligned with the last entry, so query i has position
//   length of the sequence - q_tokens + i.
// A query at a negative position sees no key.
//
// A cache of several position parts (PartRule) holds some blocks of the sequence. Entries are then
// counted on the part alone: keep_length, append_tokens, and entry p of `table` below.
struct alignas(16) PagedRow {
  // The row's first query in q and out. Queries of a row are consecutive, and rows lie there in the
  // order of their index without overlap.
  int32_t first_q = 0;
  int32_t q_tokens = 0;  // 0: the row only appends
  // The row's first new entry in k and v.
  int32_t first_append = 0;
  int32_t append_tokens = 0;
  int32_t keep_length = 0;  // entries in front of the new ones
  // Where the row's block table begins in `tables`. Entry p lies in block
  // tables[table + p / block_tokens]. The table has an element for each block of the sequence.
  // Elements of blocks in which no query sees a key and no entry is appended are not used.
  int32_t table = 0;
  // The position of query 0 in the whole sequence. Read only if the cache has several parts; in one
  // part it is keep_length + append_tokens - q_tokens.
  int32_t first_position = 0;
  int32_t unused = 0;
};
static_assert(sizeof(PagedRow) == 32);

// The work of one launch.
struct alignas(16) PagedStep {
  int32_t num_rows = 0;  // at most BatchClass::max_rows; the kernels ignore later rows
  int32_t plane = 0;     // of the cache, from 0
  uint32_t number = 0;   // stored at Buffers::done when the results are complete
  int32_t unused = 0;
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_ROWS_H_
