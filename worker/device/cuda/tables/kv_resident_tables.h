// The block tables of a group that stay in device memory from step to step, and which of their
// elements the device lacks. A decode step changes few elements of long tables.
//
// Plain arithmetic, without CUDA. Tests: kv_resident_tables_test.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_RESIDENT_TABLES_H_
#define RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_RESIDENT_TABLES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "worker/device/device_kv_cache.h"

namespace ringattn::worker {

// Row i of a step has slot i, so a sequence that stays in its row keeps its place. Not thread safe.
class KvResidentTables {
 public:
  // Elements [first, first + count) of device memory.
  struct Run {
    int64_t first = 0, count = 0;
    bool operator==(const Run& other) const { return first == other.first && count == other.count; }
  };

  // Changes that are closer than this are copied together. One copy takes as long as 64 KiB.
  static constexpr int64_t kNear = 16 * 1024;
  // More changes than this are copied as one run.
  static constexpr size_t kMostRuns = 4;

  // `max_elements`: of the device memory.
  explicit KvResidentTables(int64_t max_elements) : max_elements_(max_elements) {}

  // Places the tables of a step. REQUIRES: together they have at most max_elements elements.
  void Place(absl::Span<const DeviceKvRow> rows);

  // Where the table of a row of the last step begins.
  int64_t first_element(size_t row) const { return slots_[row].first; }

  // The elements that the device lacks, in ascending order.
  const std::vector<Run>& changes() const { return changes_; }
  // All elements, as the device will hold them.
  const uint32_t* elements() const { return elements_.data(); }

  // All changes have been copied.
  void NoteCopied() { changes_.clear(); }
  // The device memory has been overwritten.
  void Forget();

 private:
  // A table grows in place until it exceeds its slot's count.
  void Divide(absl::Span<const DeviceKvRow> rows);
  void Update(const Run& slot, absl::Span<const uint32_t> table);
  void JoinChanges();

  const int64_t max_elements_;
  std::vector<Run> slots_;
  std::vector<uint32_t> elements_;  // as the device will hold them
  std::vector<Run> changes_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_TABLES_KV_RESIDENT_TABLES_H_
