// The folder in which a launcher keeps what other processes need: its process id (in a file that it
// holds locked), the cluster's secret, ports and logs.
// Tests: state_dir_test.cc.
#ifndef RINGATTN_CLIENT_LAUNCHER_STATE_DIR_H_
#define RINGATTN_CLIENT_LAUNCHER_STATE_DIR_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ringattn::client {

// Returns $XDG_RUNTIME_DIR/ringattn, or /tmp/ringattn-<uid>.
std::string DefaultStateDir();

// A state folder that this process owns until it ends. Movable. Thread compatible.
class StateDir {
 public:
  // Creates the folder (0700) if necessary and takes its lock. Errors: FAILED_PRECONDITION if a
  // launcher runs there; PERMISSION_DENIED if the folder belongs to another user; the system's.
  static absl::StatusOr<StateDir> Acquire(const std::string& path);

  StateDir(StateDir&& other) noexcept;
  StateDir& operator=(StateDir&&) = delete;
  ~StateDir();  // removes the secret and the process id

  std::string File(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

  // For EndTimeout. Errors: the system's.
  absl::Status WriteEndTimeout(absl::Duration timeout) const;
  // Writes a new random secret that only the owner can read, and returns its path.
  absl::StatusOr<std::string> WriteSecret() const;

 private:
  StateDir(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  std::string path_;
  int lock_;
};

// Returns the process id of the launcher that runs in `path`, if one does.
std::optional<pid_t> RunningLauncher(const std::string& path);

// Returns how long the launcher that runs in `path` may take to end, as it recorded; one minute if
// it did not.
absl::Duration EndTimeout(const std::string& path);

// Ends the launcher that runs in `path`: SIGTERM, and after `timeout` SIGKILL, upon which the
// kernel kills its children. Returns whether there was one. `report` receives the processes that
// still run, after one second and then every five. Errors: the system's; DEADLINE_EXCEEDED if it
// does not end even then.
absl::StatusOr<bool> StopLauncher(
    const std::string& path, absl::Duration timeout,
    const std::function<void(const std::vector<std::string>&)>& report = [](const auto&) {});

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_STATE_DIR_H_
