#include "common/process/container_limits.h"

#include <fstream>

namespace ringattn {
namespace {

// Version 1 reports "no limit" as the largest multiple of a page.
constexpr int64_t kUnlimitedBytes = int64_t{1} << 62;

// Reads the numbers at the beginning of a file; stops at "max", which means no limit.
template <typename... T>
bool ReadNumbers(const std::string& path, T*... values) {
  std::ifstream file(path);
  return static_cast<bool>((file >> ... >> *values));
}

}  // namespace

ContainerLimits ReadContainerLimits(const std::string& root) {
  ContainerLimits limits;
  int64_t bytes = 0;
  if ((ReadNumbers(root + "/memory.max", &bytes) ||
       ReadNumbers(root + "/memory/memory.limit_in_bytes", &bytes)) &&
      bytes > 0 && bytes < kUnlimitedBytes) {
    limits.memory_bytes = bytes;
  }
  double quota = 0, period = 0;
  if ((ReadNumbers(root + "/cpu.max", &quota, &period) ||
       (ReadNumbers(root + "/cpu/cpu.cfs_quota_us", &quota) &&
        ReadNumbers(root + "/cpu/cpu.cfs_period_us", &period))) &&
      quota > 0 && period > 0) {
    limits.cpus = quota / period;
  }
  return limits;
}

}  // namespace ringattn
