// The rows of a layer group's latest step in the form that the paged kernels read, and the sizes
// that choose its batch class.
//
// Plain arithmetic, without CUDA. Tests: kv_group_rows_test.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_GROUP_ROWS_H_
#define RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_GROUP_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/device/cuda/tables/kv_batch_class.h"
#include "worker/device/cuda/tables/kv_resident_tables.h"
#include "worker/device/device_kv_cache.h"

namespace ringattn::worker {

inline constexpr int64_t kMaxKvRows = 4096;                 // Limits::max_step_rows
inline constexpr int64_t kMaxKvEntries = int64_t{1} << 30;  // of a sequence, as PagedRow says

// RESOURCE_EXHAUSTED: the call has `value` of `what`.
absl::Status KvCallTooLarge(const char* what, int64_t value, int64_t limit);

struct KvGroupRows {
  // `elements`: of the block tables of one step, at most.
  explicit KvGroupRows(int64_t elements) : max_elements(elements), resident_tables(elements) {}

  // Takes the rows of a step. `inline_bytes`: as kInlineTableBytes. RESOURCE_EXHAUSTED, with the
  // value and the maximum, if they are too many or too long; then nothing changes.
  absl::Status Set(absl::Span<const DeviceKvRow> step_rows, int64_t inline_bytes);

  // The block tables stay in device memory.
  bool resident() const { return table_bytes == 0; }

  int64_t max_elements;
  bool uploaded = false;             // device memory holds `staging`
  std::vector<char> staging;         // [rows] PagedRow and the elements of tables that travel
  KvResidentTables resident_tables;  // the elements of others
  int64_t table_bytes = 0;           // KvTableClass
  int64_t rows = 1;                  // of the batch class
  int64_t num_rows = 0;
  int64_t max_q = 0, total_q = 0;
  int64_t max_append = 0, total_append = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_GROUP_ROWS_H_
