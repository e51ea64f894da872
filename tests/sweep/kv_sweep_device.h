// The device on which the sweep over K/V caches runs. kv_sweep_cpu.cc and kv_sweep_gpu.cc define
// it.
#ifndef RINGATTN_TESTS_SWEEP_KV_SWEEP_DEVICE_H_
#define RINGATTN_TESTS_SWEEP_KV_SWEEP_DEVICE_H_

#include <memory>

#include "worker/device/device.h"

namespace ringattn::tests {

// Exits the process, with an error message, if there is no such device.
std::unique_ptr<worker::Device> MakeKvSweepDevice();

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_KV_SWEEP_DEVICE_H_
