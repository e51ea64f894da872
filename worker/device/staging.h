// Upload and Download: bytes of a request on their way between the wire and a device.
// Devices with memory of their own put a bounded pool of staging memory between the
// two, so that wire, copy and compute overlap; on the CPU both ends are the same memory.
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

struct UploadTarget {
  void* data = nullptr;  // device memory
  int64_t bytes = 0;
};

// How far a run of bytes has come among its targets, each filled before the next one begins.
class TargetCursor {
 public:
  explicit TargetCursor(std::vector<UploadTarget> targets) : targets_(std::move(targets)) {}

  // Calls visit(void* to, int64_t bytes) for the places of the next `bytes`, in order; never with
  // 0. REQUIRES: the targets have room for them.
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
  int64_t filled_bytes_ = 0;  // of that target
};

// One run of bytes to places in device memory, one after the other, each filled before the next one
// begins. Used by one thread. Destroyed unfinished, it leaves them undefined.
class Upload {
 public:
  virtual ~Upload() = default;

  // Takes the next bytes; the source is free on return. May wait, within a bound, for
  // staging memory: UNAVAILABLE past it. REQUIRES: no more than announced in all.
  virtual absl::Status Append(const void* data, int64_t bytes) = 0;

  // The same of memory that is pinned (Device::PinHost), within one pin: nothing stages it, and it
  // must stay as it is until the events of Finish are done.
  virtual absl::Status AppendPinned(const void* data, int64_t bytes) { return Append(data, bytes); }

  // Events after which everything is on the device; none if it is already.
  virtual absl::StatusOr<std::vector<EventRef>> Finish() = 0;
};

struct DeviceRange {
  const void* data = nullptr;  // device memory
  int64_t bytes = 0;
};

// Ranges of device memory as host memory, in order. One reader; the destructor waits
// until the device's memory is no longer read.
class Download {
 public:
  // A part of one of the ranges, on the host.
  struct HostRange {
    size_t range = 0;    // index
    int64_t offset = 0;  // in the range
    const uint8_t* data = nullptr;
    int64_t bytes = 0;
    // Keeps `data` valid; null if it is the device's memory itself.
    std::shared_ptr<const void> keeper;
  };

  virtual ~Download() = default;

  // The next 1..max_bytes bytes, never across ranges. Empty if they are not on the host
  // yet (the notice given at the start follows), or at the end.
  virtual absl::StatusOr<std::optional<HostRange>> Next(int64_t max_bytes) = 0;

  // True once Next has returned everything.
  virtual bool finished() const = 0;

  // From the first copy's begin to the last one's end, the time that copies took in all.
  // Complete once finished.
  virtual absl::Duration copy_time() const = 0;
};

// For devices whose memory is host memory: copied once on the way in, borrowed on the
// way out.
std::unique_ptr<Upload> MakeHostUpload(std::vector<UploadTarget> targets);
std::unique_ptr<Download> MakeHostDownload(std::vector<DeviceRange> ranges);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_STAGING_H_
