#include "client/launcher/worker_device.h"

#include "absl/strings/str_cat.h"

namespace ringattn::client {

std::string WorkerDevice(const std::string& device, int index) {
  return device == "cuda" ? absl::StrCat("cuda:", index) : device;
}

}  // namespace ringattn::client
