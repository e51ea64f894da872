#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/flags/flag.h"
#include "tests/sweep/kv_sweep_device.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/cuda_kv_caches.h"

ABSL_FLAG(bool, resident_tables, false,
          "keep all block tables in device memory, as long ones are kept");

namespace ringattn::tests {

std::unique_ptr<worker::Device> MakeKvSweepDevice() {
  auto device = worker::CudaDevice::Create({.device = 0,
                                            .pinned_pool_bytes = 32 << 20,
                                            .make_kv_caches = absl::GetFlag(FLAGS_resident_tables)
                                                                  ? worker::MakeResidentCudaKvCaches
                                                                  : worker::MakeCudaKvCaches});
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    std::exit(2);
  }
  std::printf("%s\n", (*device)->description().c_str());
  return *std::move(device);
}

}  // namespace ringattn::tests
