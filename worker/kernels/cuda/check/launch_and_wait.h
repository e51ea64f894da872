// Prepared kernels run in tests.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_LAUNCH_AND_WAIT_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_LAUNCH_AND_WAIT_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {

using Prepared = absl::StatusOr<std::unique_ptr<PreparedKernel>>;

// Runs a prepared call with tables and scratch of exactly the stated size.
inline void LaunchAndWait(const Prepared& prepared, const uint32_t* stop_word = nullptr) {
  Check(prepared.status());
  PreparedKernel& kernel = **prepared;
  std::vector<char> host(kernel.table_bytes());
  Buffer tables(std::max<int64_t>(kernel.table_bytes(), 1));
  Buffer scratch(std::max<int64_t>(kernel.scratch_bytes(), 1));
  Check(kernel.PlaceScratch(scratch.get()));
  kernel.WriteTables(host.data());
  tables.Upload(host);
  Check(kernel.Launch({nullptr, tables.get(), scratch.get(), stop_word}));
  Check(cudaDeviceSynchronize(), "kernel");
  if (!tables.GuardsIntact() || !scratch.GuardsIntact()) {
    std::fprintf(stderr, "FATAL: tables or scratch overrun\n");
    std::exit(2);
  }
}

// The fastest of so many launches, in seconds.
inline double BestSeconds(const Prepared& prepared, int launches) {
  Check(prepared.status());
  PreparedKernel& kernel = **prepared;
  std::vector<char> host(kernel.table_bytes());
  kernel.WriteTables(host.data());
  Buffer tables(std::max<int64_t>(kernel.table_bytes(), 1));
  Buffer scratch(std::max<int64_t>(kernel.scratch_bytes(), 1));
  tables.Upload(host);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  float best = INFINITY;
  for (int i = 0; i < launches; ++i) {
    Check(cudaEventRecord(begin, nullptr), "cudaEventRecord");
    Check(kernel.Launch({nullptr, tables.get(), scratch.get(), nullptr}));
    Check(cudaEventRecord(end, nullptr), "cudaEventRecord");
    Check(cudaDeviceSynchronize(), "kernel");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    best = std::min(best, milliseconds);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  return best / 1e3;
}

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_LAUNCH_AND_WAIT_H_
