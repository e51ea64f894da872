// Supervisor: keeps a set of child processes running. It restarts a child that exits, after a pause
// that grows while the child keeps exiting; kills and restarts a child that stays stopped
// (SIGSTOP); and ends all of them at the end.
// Tests: supervisor_test.cc.
#ifndef RINGATTN_CLIENT_LAUNCHER_SUPERVISOR_H_
#define RINGATTN_CLIENT_LAUNCHER_SUPERVISOR_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn::client {

struct ChildSpec {
  std::string name;
  // Called for every start, because a restart may need other arguments than the first start.
  std::function<std::vector<std::string>()> command;
  std::string log_path;  // empty: output goes to this process's, and last_output() is empty
  // Returns whether the child answers. Called every probe_interval; may block for a second. Null:
  // not probed.
  std::function<bool()> answers = nullptr;
};

struct SupervisorOptions {
  // A shorter stop is a debugger or a shell; during a longer one the ring waits in vain.
  absl::Duration stopped_max = absl::Seconds(3);
  absl::Duration initial_backoff = absl::Milliseconds(200);
  absl::Duration max_backoff = absl::Seconds(5);
  absl::Duration probe_interval = absl::Seconds(5);
  // A child that has not answered for this long is killed and restarted. Longer than a coordinator
  // needs to detect the problem itself (30 s).
  absl::Duration silent_max = absl::Seconds(40);
  // A longer log is renamed to NAME.1, replacing the previous one. A child's logs therefore take at
  // most twice this, and what it writes between two polls.
  int64_t max_log_bytes = 16 << 20;
  // The backoff of a child that has lived this long restarts at its initial value.
  absl::Duration healthy_after = absl::Seconds(10);
};

// Starts, polls and ends its children on the calling thread, which must be the main thread
// (child_process.h). Not thread safe.
class Supervisor {
 public:
  // `log` receives a line for each event.
  Supervisor(const SupervisorOptions& options, std::function<void(const std::string&)> log)
      : options_(options), log_(std::move(log)) {}
  ~Supervisor();  // kills children that still run

  // Errors: those of the first start.
  absl::Status Add(ChildSpec spec);

  // Checks all children once. Blocks only in `answers`. Call a few times per second.
  void Poll();

  // Returns how often the named child has exited. Requires that it was added.
  int exit_count(absl::string_view name) const;
  pid_t pid(absl::string_view name) const;  // 0 while it does not run
  // Returns the child's last exit status, as from waitpid(), and the end of what it had written by
  // then.
  int last_exit(absl::string_view name) const;
  const std::string& last_output(absl::string_view name) const;

  // Ends these children permanently: SIGTERM, and SIGKILL for those left after `timeout`, or as
  // soon as `hurry` returns true. `hurry` is polled some hundred times per second. Waits for them.
  void End(
      const std::vector<std::string>& names, absl::Duration timeout,
      const std::function<bool()>& hurry = [] { return false; });
  void EndAll(
      absl::Duration timeout, const std::function<bool()>& hurry = [] { return false; });

 private:
  struct Child {
    ChildSpec spec;
    pid_t pid = 0;
    int exits = 0;
    int last_exit = 0;
    std::string last_output;
    int64_t log_begin = 0;  // the log's size at the start
    bool ended = false;     // permanently
    absl::Time started = absl::InfinitePast();
    absl::Time restart_at = absl::InfiniteFuture();
    absl::Time stopped_since = absl::InfiniteFuture();
    absl::Time answered = absl::InfinitePast();
    absl::Time probe_at = absl::InfinitePast();
    absl::Duration backoff = absl::ZeroDuration();
  };

  absl::Status Start(Child& child);
  void Reap(Child& child);
  // Returns true if the child is stopped. Kills it if it has been stopped for too long.
  bool KillIfStopped(Child& child);
  void KillIfSilent(Child& child);
  void BoundLog(Child& child);
  const Child& Find(absl::string_view name) const;

  const SupervisorOptions options_;
  const std::function<void(const std::string&)> log_;
  std::vector<Child> children_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_SUPERVISOR_H_
