// `ringattn workers`: the workers of one machine, or of one pod, as child processes; the
// coordinator is elsewhere.
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

// What the group itself reads of its members' flags.
struct GroupFlags {
  std::string health_listen;  // empty: none
  absl::Duration drain_timeout = absl::Seconds(30);
  bool check_flags = false;
};

// Errors: INVALID_ARGUMENT, naming the flag, if one is not of the form --name=value, if
// --health_listen leaves no ports for the members', or if what the group gives is given.
absl::StatusOr<GroupFlags> ReadGroupFlags(const std::vector<std::string>& flags, int count);

// The flags of member `index`, of all that were given:
//   --name=N                         N-index
//   --data_listen, --metrics_listen, --client_data_listen, --client_data_address
//                                    the port `index` higher, unless it is 0
//   --health_listen=HOST:P           127.0.0.1:P+1+index; the group itself answers at HOST:P
//   others                           as they are
// and --device=cuda:index unless a device is given, --local_workers and --local_rank.
// REQUIRES: ReadGroupFlags takes them.
std::vector<std::string> MemberFlags(const std::vector<std::string>& flags, int index, int count);

// Starts the members and keeps them running until SIGTERM or SIGINT: what dies or does not answer
// is started again. Then all of them leave the ring; a second signal ends them at once. At
// --health_listen it says liveness while it runs, and readiness while every member is ready. Their
// output is this process's. With --check_flags: the first member's complaint, or OK.
// Call once, from the main thread. Errors: UNAVAILABLE if a member cannot start, or a port is
// taken.
absl::Status RunWorkerGroup(const WorkerGroupOptions& options);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_WORKER_GROUP_H_
