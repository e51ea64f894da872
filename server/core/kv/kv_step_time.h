// The predicted time of a decode step, by which the coordinator compares placements of a cache.
// Pure. Tests: kv_members_test.
#ifndef RINGATTN_SERVER_CORE_KV_KV_STEP_TIME_H_
#define RINGATTN_SERVER_CORE_KV_KV_STEP_TIME_H_

#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"

namespace ringattn::server {

// Rates of reading K and V: below an H100's or H200's memory, and one processor's share of a
// host's.
inline constexpr double kGpuMemoryBytesPerSecond = 3e12;
inline constexpr double kCpuMemoryBytesPerSecond = 10e9;

// The slowest of the workers that a cache may use.
struct KvWorkerRates {
  double memory_bytes_per_second = kCpuMemoryBytesPerSecond;
  double flops_per_second = 0;  // of forward kernels; 0: not measured
};

// Seconds of one step of one sequence that fills the cache, with one query, over all layers:
//   reading     the largest of a rank's bytes of K and V by its memory's rate and their products by
//               its kernels' rate. A window bounds the entries that are read
//   calls       one for each layer, with kStepCallSeconds and kStepRankSeconds for each further
//   rank merging     with position parts, fp32 results of all ranks at kMergedBytesPerSecond
// Groups share the cache's entries equally.
double PredictKvStepSeconds(const KvCacheSpec& spec, const KvPlacement& placement,
                            const KvWorkerRates& rates);

// Measured over host memory (docs/inference.md).
inline constexpr double kStepCallSeconds = 25e-6;
inline constexpr double kStepRankSeconds = 3e-6;
inline constexpr double kMergedBytesPerSecond = 2e9;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_KV_KV_STEP_TIME_H_
