// A bar on stderr for work that takes a while; nothing at all where stderr is no
// terminal, so that logs and pipes stay clean.
#ifndef RINGATTN_CLIENT_CLI_PROGRESS_BAR_H_
#define RINGATTN_CLIENT_CLI_PROGRESS_BAR_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringattn::client::cli {

// Thread safe.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();  // takes the bar away

  bool visible() const { return visible_; }

  // Draws at most ten times a second.
  void Update(absl::string_view what, double fraction);

  void Clear();

 private:
  const bool visible_;
  absl::Mutex mutex_;
  absl::Time drawn_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::string what_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PROGRESS_BAR_H_
