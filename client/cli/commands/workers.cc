#include <memory>

#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/launcher/worker_group.h"

namespace ringattn::client::cli {
namespace {

int RunWorkers(const WorkerGroupOptions& options) {
  const absl::Status status = RunWorkerGroup(options);
  if (status.ok()) return kSuccess;
  return Fail(absl::IsInvalidArgument(status) ? UsageError(status.message()) : status, false);
}

}  // namespace

void AddWorkers(FlagSet& program, Run& run) {
  auto options = std::make_shared<WorkerGroupOptions>();
  FlagSet& command = program.AddCommand(
      "workers",
      "Run several workers on this machine, one process per GPU, for a coordinator elsewhere. "
      "Restarts workers that exit or do not answer. Arguments after \"--\" are flags of "
      "ringattn-worker, as --name=value. Each worker gets its number appended to --name and added "
      "to the ports of --data_listen, --client_data_listen, --client_data_address and "
      "--metrics_listen, and --device=cuda:NUMBER unless a device is given. --health_listen is the "
      "address of this command, which is ready when all workers are; the ports after it on "
      "loopback "
      "are the workers'. SIGTERM or Ctrl-C lets the workers leave the ring and ends them; a second "
      "signal ends them at once");
  command.Add("--count", &options->count, "Workers").InRange(1, 64).Required();
  command.Add("--bin_dir", &options->bin_dir,
              "Folder of ringattn-worker; default: $RINGATTN_BIN_DIR, or next to this program");
  command.Add("flags", &options->flags, "Flags of ringattn-worker, after --");
  command.OnChosen([options, &run] { run = [options] { return RunWorkers(*options); }; });
}

}  // namespace ringattn::client::cli
