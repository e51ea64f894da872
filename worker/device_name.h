// What the flag --device names, before anything is known about the machine.
#ifndef RINGATTN_WORKER_DEVICE_NAME_H_
#define RINGATTN_WORKER_DEVICE_NAME_H_

#include <string>

#include "absl/status/statusor.h"

namespace ringattn::worker {

enum class DeviceKind { kCpu, kCuda };

struct DeviceName {
  bool automatic = false;  // then the rest is unset
  DeviceKind kind = DeviceKind::kCpu;
  int cuda_index = 0;
};

// "auto", "cpu" or "cuda:N". INVALID_ARGUMENT, naming the three, for anything else.
absl::StatusOr<DeviceName> ParseDeviceName(const std::string& text);

// The device that "auto" stands for on a machine with `cuda_devices` GPUs whose
// `local_workers` workers all ask for "auto": worker `local_rank` takes the GPU of that
// number if there is one for every worker, and all of them compute on the CPU otherwise,
// since one ring is all of one kind.
DeviceName ChooseDevice(int cuda_devices, int local_workers, int local_rank);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_NAME_H_
