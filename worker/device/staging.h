// Upload and Download: bytes of a request in transit between the wire and a device. Devices with
// separate memory put a bounded pool of staging memory between the two, so that network, copy and
// compute overlap. On the CPU both are the same memory.
#ifndef RINGATTN_WORKER_DEVICE_STAGING_H_
#define RINGATTN_WORKER_DEVICE_STAGING_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/device/event.h"

namespace ringattn::worker {

class Device;

struct UploadTarget {
  void* data = nullptr;  // device memory
  int64_t bytes = 0;
};

// The position of a sequence of bytes in a list of targets, which are filled one after another.
class TargetCursor {
 public:
  explicit TargetCursor(std::vector<UploadTarget> targets) : targets_(std::move(targets)) {}

  // Calls `visit(void* to, int64_t bytes)` for the destinations of the next `bytes`, in order,
  // never with 0 bytes. REQUIRES: the targets have room.
  template <typename Visit>
  void Advance(int64_t bytes, const Visit& visit) {
    while (bytes > 0) {
      const UploadTarget& target = targets_[index_];
      const int64_t part = std::min(bytes, target.bytes - filled_bytes_);
      if (part > 0)
        visit(static_cast<void*>(static_cast<char*>(target.data) + filled_bytes_), part);
      bytes -= part;
      filled_bytes_ += part;
      if (filled_bytes_ < target.bytes) continue;
      ++index_;
      filled_bytes_ = 0;
    }
  }

 private:
  std::vector<UploadTarget> targets_;
  size_t index_ = 0;
  int64_t filled_bytes_ = 0;  // of the current target
};

// One sequence of bytes that fills targets in device memory one after another. Not thread safe. If
// it is destroyed before Finish, the targets' contents are undefined.
class Upload {
 public:
  virtual ~Upload() = default;

  // Copies the next bytes; the source may be reused on return. May wait for staging memory, and
  // returns UNAVAILABLE if there is none in time. REQUIRES: the total does not exceed the targets.
  virtual absl::Status Append(const void* data, int64_t bytes) = 0;

  // Like Append, for memory within one pin (Device::PinHost). It is not staged and must stay
  // unchanged until the events of Finish are done.
  virtual absl::Status AppendPinned(const void* data, int64_t bytes) { return Append(data, bytes); }

  // Returns the events after which everything is on the device; none if it already is.
  virtual absl::StatusOr<std::vector<EventRef>> Finish() = 0;
};

struct DeviceRange {
  const void* data = nullptr;  // device memory
  int64_t bytes = 0;
};

// Ranges of device memory read as host memory, in order. For one reader. The destructor waits until
// the device memory is no longer read.
class Download {
 public:
  // A piece of one of the ranges, on the host.
  struct HostRange {
    size_t range = 0;    // index
    int64_t offset = 0;  // in the range
    const uint8_t* data = nullptr;
    int64_t bytes = 0;
    // Keeps `data` valid; null if `data` is the device's memory itself.
    std::shared_ptr<const void> keeper;
  };

  virtual ~Download() = default;

  // Returns the next 1..max_bytes bytes, never across ranges. Returns nothing at the end, or if
  // they are not on the host yet; on_ready is then called later.
  virtual absl::StatusOr<std::optional<HostRange>> Next(int64_t max_bytes) = 0;

  // Returns true once Next has returned everything.
  virtual bool finished() const = 0;

  // Returns the total time of the copies. Final once finished.
  virtual absl::Duration copy_time() const = 0;
};

// For devices that compute in host memory: uploads copy once, downloads borrow.
std::unique_ptr<Upload> MakeHostUpload(std::vector<UploadTarget> targets);
std::unique_ptr<Download> MakeHostDownload(std::vector<DeviceRange> ranges);

// For at most a few hundred KiB: uploads without staging memory, which other requests may occupy.
// Each target is filled by one copy, once its last byte is appended. Data that fills a target alone
// must stay valid until the events (Device::StartCopyFromHost). REQUIRES: the bytes fill all
// targets. `device` must outlive the upload. Small downloads are Device::CopyAllToHost.
std::unique_ptr<Upload> MakeSmallUpload(Device* device, std::vector<UploadTarget> targets);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_STAGING_H_
