// One progress of several requests that make up a call.
#ifndef RINGATTN_CLIENT_MERGED_PROGRESS_H_
#define RINGATTN_CLIENT_MERGED_PROGRESS_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// Reports the state of the request that is least far, and of that state's work the
// fraction done over all requests: those beyond it have done all of theirs. Thread safe.
class MergedProgress {
 public:
  // `bytes`: each request's, by which it counts. `report` is called under a lock, one
  // call at a time.
  MergedProgress(std::vector<double> bytes, std::function<void(const v1::Progress&)> report);

  void Update(size_t request, const v1::Progress& progress);

 private:
  v1::Progress Merged() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<double> bytes_;
  const std::function<void(const v1::Progress&)> report_;
  absl::Mutex mutex_;
  std::vector<v1::Progress> latest_ ABSL_GUARDED_BY(mutex_);  // queued until heard of
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MERGED_PROGRESS_H_
