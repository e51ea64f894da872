// Keeps a set of child processes running: what dies is started again after a pause
// that grows while it keeps dying, what stands stopped (SIGSTOP) for too long is
// killed first, and at the end all of them end.
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
  // Asked at every start, as a restart may need other words than the first one.
  std::function<std::vector<std::string>()> command;
  std::string log_path;  // empty: the output is this process's, and its last words are unknown
  // Whether it answers; asked at each probe_interval, and may block for a second. None:
  // it need not.
  std::function<bool()> answers = nullptr;
};

struct SupervisorOptions {
  // A stop shorter than this is somebody's debugger or shell; longer, and the ring
  // waits for it in vain.
  absl::Duration stopped_max = absl::Seconds(3);
  absl::Duration initial_backoff = absl::Milliseconds(200);
  absl::Duration max_backoff = absl::Seconds(5);
  absl::Duration probe_interval = absl::Seconds(5);
  // A child that has not answered for this long is killed, so that another takes its
  // place. Longer than a coordinator needs to find out by itself (30 s).
  absl::Duration silent_max = absl::Seconds(40);
  // A log that is longer becomes NAME.1 in place of the one before: twice this for each
  // child, and what it writes between two looks.
  int64_t max_log_bytes = 16 << 20;
  // A child that lived this long starts over with the initial backoff.
  absl::Duration healthy_after = absl::Seconds(10);
};

// Starts, watches and ends its children on the thread that calls it, which must be
// the main thread (child_process.h). Not thread safe.
class Supervisor {
 public:
  // `log` gets a line for each thing that happens.
  Supervisor(const SupervisorOptions& options, std::function<void(const std::string&)> log)
      : options_(options), log_(std::move(log)) {}
  ~Supervisor();  // kills what still runs

  // Errors: the first start's.
  absl::Status Add(ChildSpec spec);

  // One look at everything; waits for nothing but `answers`. Call a few times a second.
  void Poll();

  // How often the named child has ended. REQUIRES: it was added.
  int exit_count(absl::string_view name) const;
  pid_t pid(absl::string_view name) const;  // 0 while it does not run
  // How it ended last, as waitpid() says, and the end of what it had written by then.
  int last_exit(absl::string_view name) const;
  const std::string& last_words(absl::string_view name) const;

  // Ends these children for good: SIGTERM, and SIGKILL for what is left after `timeout`, or
  // as soon as `hurry` says so, which is asked some hundred times a second. Waits for them.
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
    std::string last_words;
    int64_t log_begin = 0;  // the log's size when it was started
    bool ended = false;     // for good
    absl::Time started = absl::InfinitePast();
    absl::Time restart_at = absl::InfiniteFuture();
    absl::Time stopped_since = absl::InfiniteFuture();
    absl::Time answered = absl::InfinitePast();
    absl::Time probe_at = absl::InfinitePast();
    absl::Duration backoff = absl::ZeroDuration();
  };

  absl::Status Start(Child& child);
  void Reap(Child& child);
  // True if it stands stopped; kills it if it has for too long.
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
