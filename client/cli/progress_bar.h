// Progress of long work on stderr: a bar on a terminal, otherwise (logs, pipes) an occasional line.
// Short work prints nothing.
// Tests: progress_bar_test.cc.
#ifndef RINGATTN_CLIENT_CLI_PROGRESS_BAR_H_
#define RINGATTN_CLIENT_CLI_PROGRESS_BAR_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client::cli {

inline constexpr absl::Duration kProgressLineInterval = absl::Seconds(10);

// Thread safe. A background thread updates the elapsed time, so that work without reports is
// visibly alive.
class ProgressBar {
 public:
  struct Options {
    bool terminal = false;
    // Without a terminal: the time between two lines.
    absl::Duration line_interval = kProgressLineInterval;
    std::function<void(const std::string&)> write;  // to stderr; one call at a time
  };

  explicit ProgressBar(absl::Duration line_interval = kProgressLineInterval);
  explicit ProgressBar(Options options);
  ~ProgressBar();  // removes the bar

  // Reports the present activity and its completed fraction in [0, 1]; below 0: unknown.
  void Update(absl::string_view what, double fraction);

  // Writes whole lines, above the bar on a terminal.
  void Print(const std::string& lines);

 private:
  void Loop();
  void Show(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const absl::Time began_ = MonotonicNow();
  absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time shown_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool bar_stands_ ABSL_GUARDED_BY(mutex_) = false;
  std::string what_ ABSL_GUARDED_BY(mutex_);
  double fraction_ ABSL_GUARDED_BY(mutex_) = -1;
  std::thread thread_;  // last, because it uses the others
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PROGRESS_BAR_H_
