// Upload and Download as on a device with memory of its own, without one: bytes are
// copied late, by a queue, through blocks of their own.
#ifndef RINGATTN_WORKER_TESTING_STAGED_COPIES_H_
#define RINGATTN_WORKER_TESTING_STAGED_COPIES_H_

#include <functional>
#include <memory>
#include <vector>

#include "worker/device/host_queue.h"
#include "worker/device/staging.h"

namespace ringattn::worker {

// As Device::BeginUpload and BeginDownload; every copy takes `delay`. `queue` outlives
// them.
std::unique_ptr<Upload> MakeStagedUpload(HostQueue* queue, absl::Duration delay,
                                         std::vector<UploadTarget> targets);
std::unique_ptr<Download> MakeStagedDownload(HostQueue* queue, absl::Duration delay,
                                             std::vector<DeviceRange> ranges,
                                             std::function<void()> on_ready);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_STAGED_COPIES_H_
