// Prepared kernels run in tests.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_AND_WAIT_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_AND_WAIT_CUH_

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/guarded_buffer.cuh"

namespace ringattn::worker::cuda {

using Prepared = absl::StatusOr<std::unique_ptr<PreparedKernel>>;

// Runs a prepared call with tables and scratch of exactly the stated size.
inline void LaunchAndWait(const Prepared& prepared, const uint32_t* stop_word = nullptr) {
  Check(prepared.status());
  PreparedKernel& kernel = **prepared;
  std::vector<char> host(kernel.table_bytes());
  kernel.WriteTables(host.data());
  Buffer tables(std::max<int64_t>(kernel.table_bytes(), 1));
  Buffer scratch(std::max<int64_t>(kernel.scratch_bytes(), 1));
  tables.Upload(host);
  Check(kernel.Launch({nullptr, tables.get(), scratch.get(), stop_word}));
  Check(cudaDeviceSynchronize(), "kernel");
  if (!tables.GuardsIntact() || !scratch.GuardsIntact()) {
    std::fprintf(stderr, "FATAL: tables or scratch overrun\n");
    std::exit(2);
  }
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_AND_WAIT_CUH_
