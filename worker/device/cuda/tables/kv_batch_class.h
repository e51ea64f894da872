// Batch classes of steps over K/V caches on a GPU: the sizes that a captured launch fixes, and
// where the tensors of its calls lie in scratch memory. Plain arithmetic.
//
// Tests: kv_batch_class_test.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_BATCH_CLASS_H_
#define RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_BATCH_CLASS_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>

#include "common/attention/dtype.h"
#include "common/base/limits.h"
#include "worker/device/device.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/paged/paged_rows.h"

namespace ringattn::worker {

// Calls of up to so many bytes go through pinned memory: one copy to the device, and kernels write
// the results to the host.
inline constexpr int64_t kSmallCallBytes = kMiB;
// A kernel fetches the input of calls of up to so many bytes. A copy to the device takes 8 us
// longer if 16 KiB of tables travel with the call, and as long without them (one H200,
// kv_gpu_bench).
inline constexpr int64_t kFetchedCallBytes = 64 * kKiB;
// Rows and block tables of up to so many bytes travel with each small call. A second copy would
// delay the first call of a step by 9 us (one H200; kv_gpu_bench --lengths=2048). Larger tables
// stay in device memory, and only their changes are copied (kv_resident_tables.h).
inline constexpr int64_t kInlineTableBytes = 32 * kKiB;
inline constexpr int64_t kPagedRowBytes = sizeof(cuda::paged::PagedRow);

// The size of a batch class for `count` rows or tokens: a power of two, or above 1024 a multiple of
// an eighth of one.
inline int64_t KvClassSize(int64_t count) {
  if (count <= 1024) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count))) / 8;
  return (count + step - 1) / step * step;
}

// The sizes that a batch class fixes, and which kernels it launches.
struct KvBatchClass {
  int group = 0;
  int64_t segment = 0;
  int64_t rows = 0;
  int64_t max_q = 0;  // 0: no queries
  int64_t total_q = 0;
  int64_t max_append = 0;  // 0: appends nothing
  int64_t total_append = 0;
  int64_t table_bytes = 0;  // of rows and block tables that travel with the call; 0: none do
  bool resident = false;    // the block tables are in device memory; at most rows travel
  bool partial = false;

  bool operator<(const KvBatchClass& other) const { return Tuple() < other.Tuple(); }

 private:
  std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool> Tuple()
      const {
    return {group,      segment,      rows,        max_q,    total_q,
            max_append, total_append, table_bytes, resident, partial};
  }
};

// KvBatchClass::table_bytes for `rows` (of the class) and so many table elements of 4 bytes: a
// power of two, or 0 if they exceed `limit`.
inline int64_t KvTableClass(int64_t rows, int64_t elements, int64_t limit = kInlineTableBytes) {
  const int64_t bytes = cuda::AlignUp(rows * kPagedRowBytes) + elements * 4;
  if (bytes > limit) return 0;
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(bytes, kKiB))));
}

// Where the tensors of a batch class lie in scratch memory, in bytes.
struct KvCallLayout {
  int64_t sinks = cuda::kTableAlignment;  // after the PagedStep
  // The PagedRows, directly followed by the table elements. Used if table_bytes > 0.
  int64_t rows = 0, tables = 0;
  int64_t q = 0, k = 0, v = 0;
  int64_t input_bytes = 0;
  int64_t lse = 0;
  int64_t out = 0;
  int64_t output_bytes = 0;

  KvCallLayout(const KvBatchClass& batch, const DeviceKvGroup& group, DType dtype) {
    const int64_t element = ElementBytes(dtype);
    const int64_t region = sinks + cuda::AlignUp(group.num_heads * 4);
    tables = region + cuda::AlignUp(batch.rows * kPagedRowBytes);
    rows = tables - batch.rows * kPagedRowBytes;
    q = region + batch.table_bytes;
    k = q + cuda::AlignUp(batch.total_q * group.num_heads * group.head_dim * element);
    v = k + cuda::AlignUp(batch.total_append * group.num_kv_heads * group.head_dim * element);
    input_bytes =
        v + cuda::AlignUp(batch.total_append * group.num_kv_heads * group.head_dim_v * element);
    out = cuda::AlignUp(batch.total_q * group.num_heads * 4);
    output_bytes = out + cuda::AlignUp(batch.total_q * group.num_heads * group.head_dim_v *
                                       (batch.partial ? 4 : element));
  }

  // The kernels fetch the input from pinned memory themselves.
  bool fetched() const { return small() && input_bytes <= kFetchedCallBytes; }
  bool small() const { return input_bytes <= kSmallCallBytes && output_bytes <= kSmallCallBytes; }
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_BATCH_CLASS_H_
