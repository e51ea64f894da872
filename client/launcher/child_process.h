// Starting and looking after one child process.
#ifndef RINGATTN_CLIENT_LAUNCHER_CHILD_PROCESS_H_
#define RINGATTN_CLIENT_LAUNCHER_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringattn::client {

// Starts `command` (its first word is a path) with its output appended to `log_path`, or
// to this process's stderr if that is empty, no input, default signals, and the kernel's promise to
// kill it when this process ends. Call from the main thread only: the promise is bound to the
// calling thread. Errors: NOT_FOUND or PERMISSION_DENIED if it cannot be executed, the system's
// others.
absl::StatusOr<pid_t> StartChild(const std::vector<std::string>& command,
                                 const std::string& log_path);

// The letter in /proc/<pid>/stat ('R', 'S', 'T' = stopped, 'Z', ...), 0 if there is
// no such process.
char ProcessState(pid_t pid);

// The running children of `parent`, as "name (process id 7)". Reads all of /proc.
std::vector<std::string> DescribeChildren(pid_t parent);

// "exited with 3", "killed by signal 9"; from waitpid's status.
std::string DescribeExit(int wait_status);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_CHILD_PROCESS_H_
