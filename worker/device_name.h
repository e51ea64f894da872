// The value of the flag --device, independent of the machine.
#ifndef RINGATTN_WORKER_DEVICE_NAME_H_
#define RINGATTN_WORKER_DEVICE_NAME_H_

#include <string>

#include "absl/status/statusor.h"

namespace ringattn::worker {

enum class DeviceKind { kCpu, kCuda };

struct DeviceName {
  bool automatic = false;  // if set, the other fields are not
  DeviceKind kind = DeviceKind::kCpu;
  int cuda_index = 0;
};

// Parses "auto", "cpu" or "cuda:N". Returns INVALID_ARGUMENT for anything else.
absl::StatusOr<DeviceName> ParseDeviceName(const std::string& text);

// Returns the device for "auto" on a machine with `cuda_devices` GPUs and `local_workers` workers.
// Worker `local_rank` gets the GPU of that index if there is one for every worker. Otherwise all
// workers use the CPU, because all members of a ring must be of one kind.
DeviceName ChooseDevice(int cuda_devices, int local_workers, int local_rank);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_NAME_H_
