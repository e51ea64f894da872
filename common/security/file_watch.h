// FileWatch: detects that files were replaced or written.
#ifndef RINGATTN_COMMON_SECURITY_FILE_WATCH_H_
#define RINGATTN_COMMON_SECURITY_FILE_WATCH_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn {

// Checks the paths' targets twice a second (inode, size, times), following links, so it detects
// renamed files, changed links and mounted secrets. It calls back when two consecutive checks
// agree, because files that belong together are rarely replaced at once. Thread safe.
class FileWatch {
 public:
  static constexpr absl::Duration kInterval = absl::Milliseconds(500);

  // Calls `on_change` on its own thread: once soon after the start, because files may have changed
  // since the caller read them, and then after each change.
  FileWatch(std::vector<std::string> paths, std::function<void()> on_change,
            absl::Duration interval = kInterval);
  ~FileWatch();  // on_change is not called after it

  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

 private:
  void Run();

  const std::vector<std::string> paths_;
  const std::function<void()> on_change_;
  const absl::Duration interval_;
  Wakeup stop_;
  std::thread thread_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_FILE_WATCH_H_
