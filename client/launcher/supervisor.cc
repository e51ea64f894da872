#include "client/launcher/supervisor.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/launcher/child_process.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

int64_t SizeOf(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  return error ? 0 : static_cast<int64_t>(size);
}

// Returns the file's content after `begin`, at most its last 2,000 bytes.
std::string OutputAfter(const std::string& path, int64_t begin) {
  constexpr int64_t kMost = 2000;
  std::ifstream file(path);
  file.seekg(std::max(begin, SizeOf(path) - kMost));
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

Supervisor::~Supervisor() { EndAll(absl::ZeroDuration()); }

absl::Status Supervisor::Add(ChildSpec spec) {
  children_.push_back({.spec = std::move(spec)});
  absl::Status status = Start(children_.back());
  if (!status.ok()) children_.pop_back();
  return status;
}

absl::Status Supervisor::Start(Child& child) {
  child.log_begin = SizeOf(child.spec.log_path);
  auto pid = StartChild(child.spec.command(), child.spec.log_path);
  if (!pid.ok()) return pid.status();
  child.pid = *pid;
  child.started = MonotonicNow();
  child.restart_at = absl::InfiniteFuture();
  child.stopped_since = absl::InfiniteFuture();
  child.answered = child.started;
  child.probe_at = child.started + options_.probe_interval;
  log_(absl::StrCat("started ", child.spec.name, ", process id ", child.pid));
  return absl::OkStatus();
}

void Supervisor::Poll() {
  const absl::Time now = MonotonicNow();
  for (Child& child : children_) {
    if (child.ended) continue;
    if (child.pid != 0) {
      Reap(child);
      if (child.pid != 0 && !KillIfStopped(child)) KillIfSilent(child);
      BoundLog(child);
    } else if (now >= child.restart_at) {
      if (absl::Status status = Start(child); !status.ok()) {
        log_(absl::StrCat("cannot start ", child.spec.name, ": ", status.ToString()));
        child.restart_at = now + options_.max_backoff;
      }
    }
  }
}

void Supervisor::Reap(Child& child) {
  int wait_status = 0;
  if (waitpid(child.pid, &wait_status, WNOHANG) != child.pid) return;
  const absl::Time now = MonotonicNow();
  const bool was_healthy = now - child.started >= options_.healthy_after;
  child.backoff = was_healthy || child.exits == 0
                      ? options_.initial_backoff
                      : std::min(2 * child.backoff, options_.max_backoff);
  log_(absl::StrCat(child.spec.name, ", process id ", child.pid, ", ", DescribeExit(wait_status),
                    "; restarting in ", absl::FormatDuration(child.backoff)));
  child.pid = 0;
  ++child.exits;
  child.last_exit = wait_status;
  child.last_output = OutputAfter(child.spec.log_path, child.log_begin);
  child.restart_at = now + child.backoff;
}

bool Supervisor::KillIfStopped(Child& child) {
  const absl::Time now = MonotonicNow();
  if (ProcessState(child.pid) != 'T') {
    child.stopped_since = absl::InfiniteFuture();
    return false;
  }
  child.stopped_since = std::min(child.stopped_since, now);
  if (now - child.stopped_since < options_.stopped_max) return true;
  log_(absl::StrCat(child.spec.name, ", process id ", child.pid, ", stands stopped: killing it"));
  kill(child.pid, SIGKILL);
  return true;
}

void Supervisor::KillIfSilent(Child& child) {
  if (child.spec.answers == nullptr || MonotonicNow() < child.probe_at) return;
  const bool answers = child.spec.answers();
  const absl::Time now = MonotonicNow();
  child.probe_at = now + options_.probe_interval;
  if (answers) child.answered = now;
  if (now - child.answered < options_.silent_max) return;
  log_(absl::StrCat(child.spec.name, ", process id ", child.pid, ", has not answered for ",
                    absl::FormatDuration(now - child.answered), ": killing it"));
  kill(child.pid, SIGKILL);
}

// The child keeps the file open with O_APPEND, so it continues at the new end.
void Supervisor::BoundLog(Child& child) {
  const std::string& path = child.spec.log_path;
  if (path.empty()) return;
  if (SizeOf(path) <= options_.max_log_bytes) return;
  std::error_code error;
  std::filesystem::copy_file(path, path + ".1", std::filesystem::copy_options::overwrite_existing,
                             error);
  if (error) log_(absl::StrCat(path, ": cannot be copied before truncating: ", error.message()));
  if (truncate(path.c_str(), 0) != 0) log_(absl::StrCat(path, ": cannot be truncated"));
  child.log_begin = 0;
}

const Supervisor::Child& Supervisor::Find(absl::string_view name) const {
  const auto found = std::find_if(children_.begin(), children_.end(),
                                  [&](const Child& child) { return child.spec.name == name; });
  assert(found != children_.end());
  return *found;
}

int Supervisor::exit_count(absl::string_view name) const { return Find(name).exits; }
pid_t Supervisor::pid(absl::string_view name) const { return Find(name).pid; }
int Supervisor::last_exit(absl::string_view name) const { return Find(name).last_exit; }
const std::string& Supervisor::last_output(absl::string_view name) const {
  return Find(name).last_output;
}

void Supervisor::End(const std::vector<std::string>& names, absl::Duration timeout,
                     const std::function<bool()>& hurry) {
  std::vector<Child*> left;
  for (Child& child : children_) {
    if (std::find(names.begin(), names.end(), child.spec.name) == names.end()) continue;
    child.ended = true;
    if (child.pid == 0) continue;
    kill(child.pid, SIGTERM);
    kill(child.pid, SIGCONT);  // a stopped process does not see SIGTERM
    left.push_back(&child);
  }
  const auto reap = [&](int flags) {
    std::erase_if(left, [&](Child* child) {
      if (waitpid(child->pid, nullptr, flags) == 0) return false;
      child->pid = 0;
      return true;
    });
  };
  const absl::Time end = MonotonicNow() + timeout;
  reap(WNOHANG);
  bool hurried = false;
  while (!left.empty() && MonotonicNow() < end && !(hurried = hurry())) {
    absl::SleepFor(absl::Milliseconds(10));
    reap(WNOHANG);
  }
  for (Child* child : left) {
    log_(absl::StrCat(child->spec.name, hurried ? ": killed at once after a second signal"
                                                : " did not end in time: killed"));
    kill(child->pid, SIGKILL);
  }
  reap(0);
}

void Supervisor::EndAll(absl::Duration timeout, const std::function<bool()>& hurry) {
  std::vector<std::string> names;
  for (const Child& child : children_) names.push_back(child.spec.name);
  End(names, timeout, hurry);
}

}  // namespace ringattn::client
