// RegionImporter: imports clients' CUDA memory in the background. Mapping a whole GPU's memory
// takes seconds, during which the listener must serve other clients.
//
// Tests: cuda_regions_fake_test.cc
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
  // One pending import. If it is dropped, the memory is unmapped as soon as it has been mapped.
  // Thread safe.
  class Import {
   public:
    bool is_done() const ABSL_LOCKS_EXCLUDED(mutex_);
    // Returns the result. Call once. REQUIRES: is_done().
    absl::StatusOr<std::shared_ptr<Region>> Take() ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    friend class RegionImporter;
    mutable absl::Mutex mutex_;
    bool is_done_ ABSL_GUARDED_BY(mutex_) = false;
    absl::StatusOr<std::shared_ptr<Region>> result_ ABSL_GUARDED_BY(mutex_) =
        absl::UnknownError("not there yet");
  };

  // `device` must outlive the importer and every region that it makes. At most `max_bytes` of
  // allocations are imported at a time. `on_done` is called on the importer's thread when an import
  // is done. `on_imported` (may be empty) is called on any thread when the total of imported bytes
  // changes.
  RegionImporter(Device* device, int64_t max_bytes, std::function<void()> on_done,
                 std::function<void(int64_t bytes)> on_imported);
  // Drops imports that have not started. Imported memory stays with its region.
  ~RegionImporter();

  RegionImporter(const RegionImporter&) = delete;
  RegionImporter& operator=(const RegionImporter&) = delete;

  // Starts an import. Never blocks. `descriptor` is the message's: empty, or of the allocation; it
  // is closed after the import. Errors of the import:
  //   INVALID_ARGUMENT     the region is not within its allocation, or from Device::ImportMemory
  //   FAILED_PRECONDITION  from Device::ImportMemory
  //   RESOURCE_EXHAUSTED   from Device::ImportMemory
  //   OUT_OF_RANGE         would exceed max_bytes
  std::shared_ptr<Import> Start(std::string region_id, int64_t bytes, CudaAllocation allocation,
                                ScopedDescriptor descriptor) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t imported_bytes() const;

 private:
  // Counts imported bytes and reports changes. Shared with the imported memory, which may outlive
  // the importer.
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
