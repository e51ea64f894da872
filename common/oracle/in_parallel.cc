#include "common/oracle/in_parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace ringattn::oracle {
namespace {

// Minimum work of a thread: a few milliseconds.
constexpr double kCostPerThread = 4e6;

}  // namespace

void InParallel(int64_t count, double cost, const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  const double worth = static_cast<double>(count) * cost / kCostPerThread;
  const int64_t processors = std::max(1u, std::thread::hardware_concurrency());
  const int64_t threads = std::min({count, processors, static_cast<int64_t>(std::min(worth, 1e6))});
  std::vector<std::thread> others;
  for (int64_t other = 1; other < threads; ++other) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace ringattn::oracle
