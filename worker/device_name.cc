#include "worker/device_name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ringattn::worker {

absl::StatusOr<DeviceName> ParseDeviceName(const std::string& text) {
  constexpr char kCuda[] = "cuda:";
  if (text == "auto") return DeviceName{.automatic = true};
  if (text == "cpu") return DeviceName{.kind = DeviceKind::kCpu};
  if (absl::StartsWith(text, kCuda)) {
    const std::string digits = text.substr(sizeof(kCuda) - 1);
    int index = 0;
    if (std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit) &&
        absl::SimpleAtoi(digits, &index)) {
      return DeviceName{.kind = DeviceKind::kCuda, .cuda_index = index};
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--device=", text, " is not a device; use auto, cpu or cuda:N"));
}

DeviceName ChooseDevice(int cuda_devices, int local_workers, int local_rank) {
  if (cuda_devices < local_workers || local_rank >= cuda_devices) {
    return {.kind = DeviceKind::kCpu};
  }
  return {.kind = DeviceKind::kCuda, .cuda_index = local_rank};
}

}  // namespace ringattn::worker
