// `ringattn workers`: the workers of one machine or one pod as child processes of this one; the
// coordinator runs elsewhere.
// Tests: worker_group_test.cc.
#ifndef RINGATTN_CLIENT_LAUNCHER_WORKER_GROUP_H_
#define RINGATTN_CLIENT_LAUNCHER_WORKER_GROUP_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ringattn::client {

struct WorkerGroupOptions {
  int count = 1;
  std::string bin_dir;             // empty: see FindBinaries
  std::vector<std::string> flags;  // of ringattn-worker, "--name=value" each; see MemberFlags
};

// The members' flags that the group itself evaluates.
struct GroupFlags {
  std::string health_listen;  // empty: none
  absl::Duration drain_timeout = absl::Seconds(30);
  bool check_flags = false;
};

// Errors: INVALID_ARGUMENT, naming the flag, if a flag is not of the form --name=value, if
// --health_listen leaves no ports for the members, or if a flag is given that the group sets.
absl::StatusOr<GroupFlags> ReadGroupFlags(const std::vector<std::string>& flags, int count);

// Returns the flags of member `index`, derived from the given ones:
//   --name=N                         N-index
//   --data_listen, --metrics_listen, --client_data_listen, --client_data_address
//                                    the port increased by `index`, unless it is 0
//   --health_listen=HOST:P           127.0.0.1:P+1+index; the group itself answers at HOST:P
//   others                           unchanged
// Adds --device=cuda:index unless a device is given, --local_workers and --local_rank. Requires
// flags that ReadGroupFlags accepts.
std::vector<std::string> MemberFlags(const std::vector<std::string>& flags, int index, int count);

// Starts the members and keeps them running until SIGTERM or SIGINT; restarts a member that exits
// or does not answer. Then all members leave the ring; a second signal ends them at once.
// --health_listen reports liveness while this runs, and readiness while every member is ready. The
// members' output is this process's. With --check_flags: returns the first member's error, or OK.
// Call once, from the main thread. Errors: UNAVAILABLE if a member cannot start or a port is taken.
absl::Status RunWorkerGroup(const WorkerGroupOptions& options);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_WORKER_GROUP_H_
