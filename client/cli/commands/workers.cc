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
      "Run several workers on this machine, one process for each GPU, of a coordinator elsewhere; "
      "restarts what dies or does not answer. What follows \"--\" are flags of ringattn-worker, as "
      "--name=value: each worker gets its number behind --name and on top of the ports of "
      "--data_listen, --client_data_listen, --client_data_address and --metrics_listen, and "
      "--device=cuda:NUMBER unless a device is given; "
      "--health_listen is this command's, which is ready when all of them are, and the ports "
      "behind "
      "it on loopback are theirs. SIGTERM or Ctrl-C lets them leave the ring and ends them; a "
      "second "
      "signal ends them at once");
  command.Add("--count", &options->count, "Workers").InRange(1, 64).Required();
  command.Add("--bin_dir", &options->bin_dir,
              "Folder of ringattn-worker; $RINGATTN_BIN_DIR, or near this program, unless "
              "given");
  command.Add("flags", &options->flags, "Flags of ringattn-worker, behind --");
  command.OnChosen([options, &run] { run = [options] { return RunWorkers(*options); }; });
}

}  // namespace ringattn::client::cli
