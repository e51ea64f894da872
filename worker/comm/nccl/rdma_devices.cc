#include "worker/comm/nccl/rdma_devices.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"

namespace ringattn::worker {
namespace {

namespace fs = std::filesystem;

bool NcclIgnoresRdma() {
  const char* const disabled = std::getenv("NCCL_IB_DISABLE");
  const char* const net = std::getenv("NCCL_NET");
  return (disabled != nullptr && std::atoi(disabled) != 0) ||
         (net != nullptr && absl::EqualsIgnoreCase(net, "Socket"));
}

bool IsActive(const fs::path& port) {
  std::string state;
  std::getline(std::ifstream(port / "state") >> std::ws, state);
  return absl::EndsWith(state, ": ACTIVE");
}

}  // namespace

std::string ActiveRdmaDevices(const std::string& sysfs) {
  if (NcclIgnoresRdma()) return "";
  std::vector<std::string> devices;
  std::error_code error;
  for (const fs::directory_entry& device : fs::directory_iterator(sysfs, error)) {
    bool active = false;
    for (const fs::directory_entry& port : fs::directory_iterator(device.path() / "ports", error)) {
      active = active || IsActive(port.path());
    }
    if (active) devices.push_back(device.path().filename());
  }
  std::sort(devices.begin(), devices.end());
  return absl::StrJoin(devices, ",");
}

}  // namespace ringattn::worker
