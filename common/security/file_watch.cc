#include "common/security/file_watch.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Returns the files' state, which changes when a file is replaced or written.
std::string Look(const std::vector<std::string>& paths) {
  std::string seen;
  for (const std::string& path : paths) {
    struct stat now {};
    if (stat(path.c_str(), &now) != 0) {
      absl::StrAppend(&seen, "none;");
      continue;
    }
    absl::StrAppend(&seen, now.st_dev, ",", now.st_ino, ",", now.st_size, ",");
    absl::StrAppend(&seen, now.st_mtim.tv_sec, ".", now.st_mtim.tv_nsec, ",");
    absl::StrAppend(&seen, now.st_ctim.tv_sec, ".", now.st_ctim.tv_nsec, ";");
  }
  return seen;
}

}  // namespace

FileWatch::FileWatch(std::vector<std::string> paths, std::function<void()> on_change,
                     absl::Duration interval)
    : paths_(std::move(paths)),
      on_change_(std::move(on_change)),
      interval_(interval),
      thread_([this] { Run(); }) {}

FileWatch::~FileWatch() {
  stop_.Notify();
  thread_.join();
}

void FileWatch::Run() {
  std::string told;  // a real state is never empty
  std::string last = Look(paths_);
  while (true) {
    if (stop_.WaitFor(interval_)) return;
    std::string now = Look(paths_);
    if (now == last && now != told) {
      told = now;
      on_change_();
    }
    last = std::move(now);
  }
}

}  // namespace ringattn
