// ringattn-worker: one device of the ring.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "common/base/version.h"
#include "common/observability/log.h"
#include "common/process/descriptors.h"
#include "common/wire/allocator.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "common/wire/grpc_log.h"
#include "worker/backend.h"
#include "worker/command_line.h"

namespace ringattn::worker {
namespace {

constexpr int kExitBroken = 70;  // EX_SOFTWARE

// Renames a complete file into place, so that a reader never sees half of it.
absl::Status WritePortFile(const std::string& path, const Worker& worker) {
  const std::string temporary = absl::StrCat(path, ".", getpid());
  std::ofstream file(temporary);
  file << nlohmann::json{{"data", worker.data_address()},
                         {"client_data", worker.client_data_address()},
                         {"metrics", worker.metrics_address()},
                         {"health", worker.health_address()}}
       << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write --port_file ", path));
  }
  return absl::OkStatus();
}

sigset_t EndSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

[[noreturn]] void Crash(const std::string& what) {
  LogError("the device is unusable; the process exits so that it is restarted", {{"what", what}});
  ShutdownLogging();
  _exit(kExitBroken);
}

// Returns " terms", " deterministic", " head_dim 40..128 by 8" and so on; omitted properties are
// arbitrary.
std::string KindText(const RequestKind& kind) {
  const RequestKind any;
  std::string text = kind.score_terms ? " terms" : "";
  if (kind.deterministic.value_or(false)) absl::StrAppend(&text, " deterministic");
  if (kind.softcap.value_or(false)) absl::StrAppend(&text, " softcap");
  if (kind.min_head_dim != any.min_head_dim || kind.max_head_dim != any.max_head_dim) {
    absl::StrAppend(&text, " head_dim ", kind.min_head_dim, "..", kind.max_head_dim);
    if (kind.head_dim_multiple > 1) absl::StrAppend(&text, " by ", kind.head_dim_multiple);
  }
  return text;
}

// Returns, for example, "sm80 forward bf16,fp16 3.7e+14 FLOP/s; sm90 backward bf16,fp16 terms
// head_dim 40..128 by 8 ...".
std::string RatesText(const std::vector<KernelRate>& rates) {
  std::string text;
  for (const KernelRate& rate : rates) {
    std::vector<std::string> dtypes;
    for (const DType dtype : rate.dtypes) dtypes.emplace_back(DTypeName(dtype));
    absl::StrAppend(&text, text.empty() ? "" : "; ", rate.family,
                    rate.direction == Direction::kBackward ? " backward " : " forward ",
                    absl::StrJoin(dtypes, ","), KindText(rate.kind), " ", rate.flops_per_second,
                    " FLOP/s");
  }
  return text;
}

// Returns only if the worker cannot start.
absl::Status Run(const CommandLine& line, const TransportSecurity& security) {
  WorkerOptions options = line.worker;
  options.security = security;
  absl::StatusOr<TransportSecurity> clients = OpenClientSecurity(line);
  if (!clients.ok()) return clients.status();
  options.client_security = *std::move(clients);
  BackendOptions backend_options = line.backend;
  backend_options.memory_limit_bytes = options.memory_limit_bytes;
  backend_options.on_broken = Crash;
  backend_options.cluster_security = security;
  // Measures before faults are injected.
  absl::StatusOr<Backend> backend = MakeBackend(backend_options);
  if (!backend.ok()) return backend.status();
  std::unique_ptr<Device>& device = backend->device;
  std::unique_ptr<RingTransport>& transport = backend->transport;
  options.kernel_rates = backend->kernel_rates;
  options.call_overhead_seconds = backend->call_overhead_seconds;
  options.memory_limit_bytes = backend->memory_limit_bytes;
  options.device_slot = backend->device_slot;
  options.export_transport = backend->export_transport;
  options.kv_spin = KvSpin(line, backend->host_memory);
  if (line.faults.has_value()) {
    auto state = std::make_shared<FaultState>();
    state->plan = *line.faults;
    state->holds_start = !backend->host_memory;
    device = MakeFaultyDevice(std::move(device), state);
    transport = MakeFaultyTransport(std::move(transport), state);
    LogWarning("faults are injected (--fault_injection)");
  }

  if (options.max_imported_bytes > 0 && !device->imports_memory()) {
    // --device=auto found no GPU. With a named device the flag is rejected earlier.
    LogWarning(
        "--local_memory=cuda_memory: the device is not a GPU, so only host memory is accepted",
        {{"device", device->description()}});
  }

  const wire::KeepAwake keep_awake;
  const auto leave = [](const std::string&) { kill(getpid(), SIGTERM); };
  absl::StatusOr<std::unique_ptr<Worker>> worker =
      Worker::Start(options, device.get(), transport.get(), leave, Crash);
  if (!worker.ok()) return worker.status();
  LogInfo("listening", {{"worker", options.name},
                        {"version", kVersion},
                        {"device", device->description()},
                        {"data_address", (*worker)->data_address()},
                        {"client_data_address", (*worker)->client_data_address()},
                        {"metrics_address", (*worker)->metrics_address()},
                        {"health_address", (*worker)->health_address()},
                        {"memory_limit_bytes", options.memory_limit_bytes},
                        {"kernel_rates", RatesText(options.kernel_rates)},
                        {"call_overhead_seconds", options.call_overhead_seconds}});
  if (!line.port_file.empty()) {
    if (absl::Status status = WritePortFile(line.port_file, **worker); !status.ok()) return status;
  }
  const sigset_t signals = EndSignals();
  int signal_number = 0;
  sigwait(&signals, &signal_number);
  LogInfo("ending", {{"worker", options.name},
                     {"signal", signal_number},
                     {"drain_timeout_seconds", absl::ToDoubleSeconds(line.drain_timeout)}});
  std::thread([signals] {
    int second = 0;
    sigwait(&signals, &second);
    _exit(128 + second);
  }).detach();
  (*worker)->Leave(line.drain_timeout);
  (*worker)->Stop();
  // Only memory and the metrics port are left, and closing the port takes two seconds.
  ShutdownLogging();
  _exit(0);
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  ringattn::wire::KeepFreedMemory();
  // The distribution's Abseil searches for lock cycles at each acquisition, also in gRPC, which
  // took 9% of the processor time per small request. Tests still do it.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  ringattn::RaiseDescriptorLimit();
  const ringattn::worker::CommandLine line = ringattn::worker::ParseCommandLine(argc, argv);
  if (line.check_flags) return 0;
  const sigset_t signals = ringattn::worker::EndSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // inherited by all threads created later
  ringattn::InitLogging("ringattn-worker", line.log_level);
  ringattn::wire::LogForGrpc();
  const auto security = line.cluster_tls.Open();
  const absl::Status status =
      security.ok() ? ringattn::worker::Run(line, *security) : security.status();
  ringattn::LogError(status.message());
  ringattn::ShutdownLogging();
  return security.ok() ? 1 : ringattn::worker::kUsageExitCode;
}
