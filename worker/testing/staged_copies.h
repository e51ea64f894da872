// Upload and Download as on a device with separate memory, without such a device: a queue copies
// bytes asynchronously through separate blocks.
#ifndef RINGATTN_WORKER_TESTING_STAGED_COPIES_H_
#define RINGATTN_WORKER_TESTING_STAGED_COPIES_H_

#include <functional>
#include <memory>
#include <vector>

#include "worker/device/host_queue.h"
#include "worker/device/staging.h"

namespace ringattn::worker {

// See Device::BeginUpload and BeginDownload. Every copy takes `delay`. `queue` must outlive both.
std::unique_ptr<Upload> MakeStagedUpload(HostQueue* queue, absl::Duration delay,
                                         std::vector<UploadTarget> targets);
std::unique_ptr<Download> MakeStagedDownload(HostQueue* queue, absl::Duration delay,
                                             std::vector<DeviceRange> ranges,
                                             std::function<void()> on_ready);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_STAGED_COPIES_H_
