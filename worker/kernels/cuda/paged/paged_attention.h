// Attention over paged K/V caches on one GPU: decode and chunked prefill.
//
//   CacheShape shape{.dtype = DType::kBFloat16, .num_kv_heads = 8, .head_dim = 128,
//                    .head_dim_v = 128, .block_tokens = 64, .blocks = 4096, .planes = 32};
//   BatchClass batch{.max_rows = 64, .max_q_tokens = 1, .max_total_q = 64, .max_append_tokens = 1};
//   auto attention = PagedAttention::Create(shape, options, batch, buffers, device);
//   ...                                    // once, before the first launch or capture
//   status = (*attention)->Enqueue(stream);  // or within a stream capture
//
// One PagedAttention serves one batch class: the largest numbers of rows and tokens, and the
// addresses of all buffers, are fixed. Rows, lengths, block tables and the plane lie in device
// memory (paged_rows.h) and may change between launches and between replays of a captured graph.
// Every layer of a model can use the same object, because the plane is part of PagedStep.
//
// Kernels: on compute capability 9.0 bf16 and fp16 caches use tensor cores and the bulk copy
// engine. Every other case uses portable kernels (compute capability 8.0 and later, and fp32).
// Tests: check/paged_check.cc, dispatch/paged_attention_test.cc, work_split_test.cc.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_ATTENTION_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/attention/dtype.h"
#include "worker/kernels/cuda/launch/device_info.h"
#include "worker/kernels/cuda/paged/paged_rows.h"

namespace ringattn::worker::cuda::paged {

// A cache: for each plane K, then V, each [blocks][block_tokens] rows of [num_kv_heads][head_dim]
// (V with head_dim_v). Rows may be wider than that: a plane may also hold layers with more or wider
// heads. A cache may hold one of several position parts of each sequence (PartRule, work_split.h).
// Results are then partial: the caller merges those of all parts.
struct CacheShape {
  DType dtype = DType::kBFloat16;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;       // 1 to 256
  int32_t head_dim_v = 0;     // 1 to 256, independent of head_dim
  int32_t block_tokens = 64;  // a power of two, 16 to 256
  int64_t blocks = 0;         // of each plane; blocks * block_tokens < 2^31
  int32_t planes = 1;
  // Elements from one row to the next; 0: num_kv_heads * head_dim, without gaps.
  int32_t k_row_elements = 0;
  int32_t v_row_elements = 0;
  int32_t position_parts = 1;  // entry p belongs to part (p / block_tokens) % position_parts
  int32_t position_part = 0;   // the cache's

  int64_t k_row_bytes() const;
  int64_t v_row_bytes() const;
  int64_t k_plane_bytes() const;
  int64_t v_plane_bytes() const;
  int64_t plane_bytes() const { return k_plane_bytes() + v_plane_bytes(); }
  int64_t bytes() const { return plane_bytes() * planes; }
};

// Options of the attention function; docs/semantics.md has the formula.
struct AttentionOptions {
  int32_t num_heads = 0;  // a multiple of num_kv_heads
  float softmax_scale = 1.0f;
  float softcap = 0.0f;      // 0: none
  int32_t window_left = -1;  // entries visible in front of the query's position; -1: all
  bool causal = true;        // false: a query also sees the entries after its position
  // False: `out` is in the cache's dtype, and sinks join each row. True: `out` is fp32 and
  // normalised, and sinks are ignored, so that the caller can merge partial results by `lse`.
  bool partial = false;  // true if the cache has several position parts
};

// The largest step that one PagedAttention accepts.
struct BatchClass {
  int32_t max_rows = 1;
  int32_t max_q_tokens = 1;       // of one row
  int32_t max_total_q = 1;        // of all rows; the stride of lse
  int32_t max_append_tokens = 1;  // of one row
  // How many thread blocks share the keys of one kv head in a decode. 0: as many as fill the GPU.
  // The result's bits depend on it.
  int32_t splits = 0;
  // Bytes at the beginning of the workspace that hold counters only, as many as the object needs if
  // that is more. Objects of equal counter_bytes whose zeroed_bytes() are not more can share a
  // workspace and never zero it between launches.
  int64_t counter_bytes = 0;
};

// Input in host memory that the device can read, such as pinned memory. Each launch copies it to
// device memory by a kernel, before it reads anything else. For small inputs: a copy engine would
// take several microseconds more.
struct FetchedInput {
  const void* source = nullptr;  // aligned to 16 bytes, as is target
  void* target = nullptr;
  int64_t bytes = 0;  // a multiple of 16; 0: nothing is copied
};

// Device memory, owned by the caller, which outlives the last launch and replay.
// No two buffers overlap. Contents may change between launches, in stream order.
struct Buffers {
  void* cache = nullptr;            // CacheShape::bytes(); aligned to 16 bytes
  const PagedStep* step = nullptr;  // one
  const PagedRow* rows = nullptr;   // [max_rows]
  const int32_t* tables = nullptr;  // block numbers, each in [0, blocks)
  const void* q = nullptr;          // [max_total_q, num_heads, head_dim], the cache's dtype
  // New entries; [sum of append_tokens, num_kv_heads, head_dim and head_dim_v], the cache's dtype.
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;  // [max_total_q, num_heads, head_dim_v]; AttentionOptions::partial
  // [num_heads, max_total_q] fp32: the natural logarithm of a row's sum of exponentials, -inf for
  // a row without keys (with a sink and !partial: the sink). Null: no lse.
  float* lse = nullptr;
  const float* sinks = nullptr;  // [num_heads] fp32, or null
  // step, rows, tables, q, k, v and sinks may lie in its target.
  FetchedInput fetched;
  // A word in host memory that the device can write, or null. If signals_done(), Enqueue and
  // EnqueueRead store PagedStep::number there after all results, which the host may read then.
  uint32_t* done = nullptr;
  // WorkspaceBytes(), aligned to 256 bytes, of which the first zeroed_bytes() are zero before the
  // first launch. One workspace serves launches that follow one another, never two at once.
  void* workspace = nullptr;
};

enum class KernelChoice {
  kAutomatic,
  kPortable,  // for tests, and to compare
};

// Thread compatible. Launches and captured graphs copy their parameters, so the object may be
// destroyed before they end.
class PagedAttention {
 public:
  virtual ~PagedAttention() = default;

  // INVALID_ARGUMENT, with the value and what is accepted, if an argument is out of range;
  // INTERNAL with CUDA's text if a kernel cannot be loaded or a tensor map cannot be encoded.
  // Loads all kernels that Enqueue launches, onto the current device.
  static absl::StatusOr<std::unique_ptr<PagedAttention>> Create(
      const CacheShape& shape, const AttentionOptions& options, const BatchClass& batch,
      const Buffers& buffers, const DeviceInfo& device,
      KernelChoice choice = KernelChoice::kAutomatic);

  // Bytes of Buffers::workspace for the same arguments; 0 if Create would return an error.
  static int64_t WorkspaceBytes(const CacheShape& shape, const AttentionOptions& options,
                                const BatchClass& batch, const DeviceInfo& device,
                                KernelChoice choice = KernelChoice::kAutomatic);

  // Appends the step's k and v to the cache, for all rows, and then attends for all rows. Rows of
  // out and lse that belong to no query are not written. Asynchronous on `stream` and legal in a
  // stream capture; never allocates and never synchronises. Returns INTERNAL if a launch fails.
  // Requires of the contents in device memory: rows within BatchClass; tables as PagedRow says;
  // a block that one row appends to is appended to by no other row of the step.
  virtual absl::Status Enqueue(cudaStream_t stream) const = 0;

  // The same without the append: k and v are not read, and append_tokens count as entries that the
  // cache already holds.
  virtual absl::Status EnqueueRead(cudaStream_t stream) const = 0;

  // The append alone.
  virtual absl::Status EnqueueAppend(cudaStream_t stream) const = 0;

  // Whether launches store Buffers::done. False without such a word, for portable kernels, and if
  // the batch class needs the prefill kernel.
  virtual bool signals_done() const = 0;

  // Bytes at the beginning of the workspace that every launch needs to be zero and leaves zero.
  // Objects that share a workspace zero them before a launch that follows one of another object,
  // unless BatchClass::counter_bytes makes that unnecessary.
  virtual int64_t zeroed_bytes() const = 0;

  // "sm90" or "portable".
  virtual const char* kernels() const = 0;
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_ATTENTION_H_
