// What the kernel's control groups leave this process of the machine, as containers are told.
#ifndef RINGATTN_COMMON_PROCESS_CONTAINER_LIMITS_H_
#define RINGATTN_COMMON_PROCESS_CONTAINER_LIMITS_H_

#include <cstdint>
#include <optional>
#include <string>

namespace ringattn {

struct ContainerLimits {
  std::optional<int64_t> memory_bytes;  // unset: no limit
  std::optional<double> cpus;           // of time, in processors; likewise
};

// Reads version 2 of control groups, else version 1, below `root`. What cannot be read is no
// limit: outside containers the files are not there. Thread safe.
ContainerLimits ReadContainerLimits(const std::string& root = "/sys/fs/cgroup");

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_CONTAINER_LIMITS_H_
