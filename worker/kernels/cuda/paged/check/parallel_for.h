// A loop whose iterations run on all processors.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_PARALLEL_FOR_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ringattn::worker::cuda::paged::check {

// Calls function(i) once for each i of [0, count), in any order, and waits for all calls.
template <typename Function>
void ParallelFor(int64_t count, const Function& function) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) function(i);
  };
  const int64_t threads =
      std::min<int64_t>(std::max(1u, std::thread::hardware_concurrency()), count);
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
}

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_PARALLEL_FOR_H_
