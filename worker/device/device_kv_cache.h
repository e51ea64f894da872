// K/V caches in a device's own memory, and the steps over them.
//
//   absl::StatusOr<std::unique_ptr<DeviceKvCache>> cache = device->kv_caches()->Make(shape);
//   status = (*cache)->Zero(stop);
//   // Of each step: its copies on write, then the rows of a group before the group's first call.
//   status = (*cache)->CopyBlock(group, source, target, entries);
//   status = (*cache)->SetRows(group, rows);
//   status = (*cache)->Run(call);
#ifndef RINGATTN_WORKER_DEVICE_DEVICE_KV_CACHE_H_
#define RINGATTN_WORKER_DEVICE_DEVICE_KV_CACHE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/attention/dtype.h"

namespace ringattn::worker {

// Layers of one shape and one mask: this rank's heads. Layer i is on plane i.
struct DeviceKvGroup {
  int64_t layers = 0;
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 1;
  int64_t head_dim_v = 1;
  float softmax_scale = 1.0f;
  float softcap = 0.0f;      // 0: none
  int64_t window_left = -1;  // entries visible before a query's own; -1: all
  bool causal = true;
  std::vector<float> sinks;  // empty, or [layers, num_heads]
};

// The memory of one rank. Each plane has an array of keys and one of values, [blocks *
// block_tokens] rows.
struct DeviceKvShape {
  struct Plane {
    int64_t k_elements = 0;  // of a row, at least those of every group with a layer on the plane
    int64_t v_elements = 0;
    bool operator==(const Plane&) const = default;
  };
  DType dtype = DType::kFloat32;
  int64_t block_tokens = 64;
  int64_t blocks = 0;
  // Entry p of a sequence belongs to part (p / block_tokens) mod position_parts. The cache holds
  // the entries of one part.
  int64_t position_parts = 1;
  int64_t position_part = 0;
  std::vector<Plane> planes;
  std::vector<DeviceKvGroup> groups;
};

// One row of a step. Entries are those of the cache's part, counted without gaps: entry p is in
// block table[p / block_tokens]. The device does not use elements of blocks in which no query sees
// an entry and nothing is appended.
struct DeviceKvRow {
  int64_t keep_length = 0;
  int64_t append_tokens = 0;
  int64_t q_tokens = 0;
  int64_t first_position = 0;  // of query 0 in the whole sequence; negative: in front of it
  absl::Span<const uint32_t> table;
};

// One layer of a step. All tensors are in host memory and have the cache's dtype unless stated.
struct DeviceKvCall {
  int group = 0;
  int plane = 0;
  absl::string_view q;     // [q_tokens of all rows, num_heads, head_dim]
  absl::string_view k, v;  // [append_tokens of all rows, num_kv_heads, dim]; both empty: reads only
  // True: `out` is fp32 and sinks do not join, so that the caller can merge results by `lse`.
  // Always true if the cache holds one of several position parts.
  bool partial = false;
  absl::Span<char> out;  // [q_tokens, num_heads, head_dim_v]
  absl::Span<char> lse;  // [num_heads, q_tokens] fp32, natural log; empty: none
};

// One rank of a cache. Used by one thread at a time.
//
// Errors: RESOURCE_EXHAUSTED if a step is too large for the device's scratch memory; the call has
// no effect. After any other error the entries are undefined and the cache must be destroyed.
class DeviceKvCache {
 public:
  virtual ~DeviceKvCache() = default;

  // Device memory of the cache: entries and block tables.
  virtual int64_t bytes() const = 0;

  // Zeroes all entries. CANCELLED soon after `stop` is set.
  virtual absl::Status Zero(const std::atomic<bool>& stop) = 0;

  // Copies the first `entries` entries of block `source` to block `target`, on all planes of the
  // group.
  virtual absl::Status CopyBlock(int group, uint32_t source, uint32_t target, int64_t entries) = 0;

  // Sets the rows for later calls of the group.
  virtual absl::Status SetRows(int group, absl::Span<const DeviceKvRow> rows) = 0;

  // Appends k and v, then attends, and returns when the results are complete. The sizes of all
  // tensors fit the group's rows.
  virtual absl::Status Run(const DeviceKvCall& call) = 0;
};

// The caches of one device. Thread safe, but the caches that it made are used by one thread at a
// time, all together: they share scratch memory.
class DeviceKvCaches {
 public:
  virtual ~DeviceKvCaches() = default;

  // Device memory that all caches together take in addition to DeviceKvCache::bytes().
  virtual int64_t scratch_bytes() const = 0;

  // Errors: UNIMPLEMENTED, with the option, its value and what is accepted, if no kernel serves a
  // group; RESOURCE_EXHAUSTED if the device has no memory. The device must outlive the cache.
  virtual absl::StatusOr<std::unique_ptr<DeviceKvCache>> Make(const DeviceKvShape& shape) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_DEVICE_KV_CACHE_H_
