// The resources that the kernel's control groups leave to this process.
#ifndef RINGATTN_COMMON_PROCESS_CONTAINER_LIMITS_H_
#define RINGATTN_COMMON_PROCESS_CONTAINER_LIMITS_H_

#include <cstdint>
#include <optional>
#include <string>

namespace ringattn {

struct ContainerLimits {
  std::optional<int64_t> memory_bytes;  // unset: no limit
  std::optional<double> cpus;           // processor time, in processors; unset: no limit
};

// Reads control groups below `root`, version 2 or else version 1. A file that cannot be read means
// no limit; outside containers the files do not exist. Thread safe.
ContainerLimits ReadContainerLimits(const std::string& root = "/sys/fs/cgroup");

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_CONTAINER_LIMITS_H_
