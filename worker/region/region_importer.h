// RegionImporter: maps clients' CUDA memory in the background. To map the memory of a whole GPU
// takes seconds, during which the listener has others to answer.
#ifndef RINGATTN_WORKER_REGION_REGION_IMPORTER_H_
#define RINGATTN_WORKER_REGION_REGION_IMPORTER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/scoped_descriptor.h"
#include "worker/device/device.h"
#include "worker/region/region.h"

namespace ringattn::worker {

// Thread safe.
class RegionImporter {
 public:
  // One region on its way. Dropped, it is unmapped as soon as it is there. Thread safe.
  class Import {
   public:
    bool is_done() const ABSL_LOCKS_EXCLUDED(mutex_);
    // Once. REQUIRES: is_done().
    absl::StatusOr<std::shared_ptr<Region>> Take() ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    friend class RegionImporter;
    mutable absl::Mutex mutex_;
    bool is_done_ ABSL_GUARDED_BY(mutex_) = false;
    absl::StatusOr<std::shared_ptr<Region>> result_ ABSL_GUARDED_BY(mutex_) =
        absl::UnknownError("not there yet");
  };

  // `device` outlives it and every region that it made. At most `max_bytes` of allocations are
  // imported at a time. `on_done`: some import is done; on the importer's thread. `on_imported`,
  // which may be empty, is told of changes of what is imported in all, on any thread.
  RegionImporter(Device* device, int64_t max_bytes, std::function<void()> on_done,
                 std::function<void(int64_t bytes)> on_imported);
  // Imports that have not begun are forgotten. What was imported stays, with its region.
  ~RegionImporter();

  RegionImporter(const RegionImporter&) = delete;
  RegionImporter& operator=(const RegionImporter&) = delete;

  // Never blocks. `descriptor` as of the message: none, or of the allocation; closed when it has
  // been imported. The import ends with
  //   INVALID_ARGUMENT     the region is not inside its allocation, or Device::ImportMemory's
  //   FAILED_PRECONDITION, RESOURCE_EXHAUSTED  Device::ImportMemory's
  //   OUT_OF_RANGE         it would be more than max_bytes
  std::shared_ptr<Import> Start(std::string region_id, int64_t bytes, CudaAllocation allocation,
                                ScopedDescriptor descriptor) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t imported_bytes() const;

 private:
  // What is imported, told when it changes. Shared with what is, which may outlive the importer.
  class Budget;
  class Counted;

  struct Job {
    std::weak_ptr<Import> import;
    std::string region_id;
    int64_t bytes = 0;
    CudaAllocation allocation;
    ScopedDescriptor descriptor;
  };

  void Run();
  absl::StatusOr<std::shared_ptr<Region>> Do(const Job& job);

  Device* const device_;
  const std::function<void()> on_done_;
  const std::shared_ptr<Budget> budget_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_IMPORTER_H_
