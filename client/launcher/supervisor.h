// Keeps a set of child processes running: what dies is started again after a pause
// that grows while it keeps dying, what stands stopped (SIGSTOP) for too long is
// killed first, and at the end all of them end.
#ifndef RINGATTN_CLIENT_LAUNCHER_SUPERVISOR_H_
#define RINGATTN_CLIENT_LAUNCHER_SUPERVISOR_H_

#include <sys/types.h>

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
  std::string log_path;
};

struct SupervisorOptions {
  // A stop shorter than this is somebody's debugger or shell; longer, and the ring
  // waits for it in vain.
  absl::Duration stopped_max = absl::Seconds(3);
  absl::Duration initial_backoff = absl::Milliseconds(200);
  absl::Duration max_backoff = absl::Seconds(5);
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

  // One look at everything; never waits. Call a few times a second.
  void Poll();

  // How often the named child has ended. REQUIRES: it was added.
  int exit_count(absl::string_view name) const;
  pid_t pid(absl::string_view name) const;  // 0 while it does not run

  // Ends these children for good: SIGTERM, and SIGKILL for what is left after `timeout`.
  // Waits for them.
  void End(const std::vector<std::string>& names, absl::Duration timeout);
  void EndAll(absl::Duration timeout);

 private:
  struct Child {
    ChildSpec spec;
    pid_t pid = 0;
    int exits = 0;
    bool ended = false;  // for good
    absl::Time started = absl::InfinitePast();
    absl::Time restart_at = absl::InfiniteFuture();
    absl::Time stopped_since = absl::InfiniteFuture();
    absl::Duration backoff = absl::ZeroDuration();
  };

  absl::Status Start(Child& child);
  void Reap(Child& child);
  void KillIfStopped(Child& child);
  const Child& Find(absl::string_view name) const;

  const SupervisorOptions options_;
  const std::function<void(const std::string&)> log_;
  std::vector<Child> children_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_SUPERVISOR_H_
