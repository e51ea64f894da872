// Starts and inspects child processes.
// Tests: supervisor_test.cc.
#ifndef RINGATTN_CLIENT_LAUNCHER_CHILD_PROCESS_H_
#define RINGATTN_CLIENT_LAUNCHER_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringattn::client {

// Starts `command`, whose first element is a path. Output is appended to `log_path`, or goes to
// this process's stderr if that is empty. The child has no input and default signals, and the
// kernel kills it when this process ends. Call only from the main thread, because the kernel binds
// that guarantee to the calling thread. Errors: NOT_FOUND or PERMISSION_DENIED if the file cannot
// be executed; the system's others.
absl::StatusOr<pid_t> StartChild(const std::vector<std::string>& command,
                                 const std::string& log_path);

// Returns the state in /proc/<pid>/stat ('R', 'S', 'T' = stopped, 'Z', ...), or 0 if there is no
// such process.
char ProcessState(pid_t pid);

// Returns the running children of `parent` as "name (process id 7)". Reads all of /proc.
std::vector<std::string> DescribeChildren(pid_t parent);

// Formats waitpid's status: "exited with 3", "killed by signal 9".
std::string DescribeExit(int wait_status);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_CHILD_PROCESS_H_
