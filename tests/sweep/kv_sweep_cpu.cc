#include "tests/sweep/kv_sweep_device.h"
#include "worker/device/cpu/cpu_device.h"

namespace ringattn::tests {

std::unique_ptr<worker::Device> MakeKvSweepDevice() {
  return std::make_unique<worker::CpuDevice>(1, 0);
}

}  // namespace ringattn::tests
