#include "worker/command_line.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/version.h"
#include "common/process/command_arguments.h"
#include "common/process/container_limits.h"
#include "common/process/duration_flag.h"
#include "common/process/log_level_flag.h"
#include "common/process/plain_text.h"
#include "common/process/secret_file.h"
#include "common/process/size_flag.h"
#include "worker/backend.h"
#include "worker/comm/sockets/ring_address.h"
#include "worker/device_name.h"
#include "worker/region/local_memory.h"

namespace ringattn::worker {
namespace {

// Values that are resolved after parsing.
struct RawOptions {
  int threads = 0;
  std::string secret_file;
  std::string fault_injection;
  std::string local_memory = "off";
  int64_t pin_local_memory = -1;     // -1: the default
  int64_t max_imported_memory = -1;  // -1: the default
  std::string local_socket_dir;
  std::vector<std::string> ring_interfaces;  // empty: --ring_address counts
};

// More than the memory of all GPUs of a machine, 8 of 192 GiB; limits address space only.
constexpr int64_t kUsualImportedBytes = int64_t{2} << 40;
constexpr int64_t kMaxMemoryBytes = int64_t{1} << 50;
// Covers a model's time between two layers on a GPU. A wake-up costs about 10 us.
constexpr absl::Duration kKvSpin = absl::Microseconds(200);

// Returns the cores that this process may use, or the container's CPU limit if that is lower.
int Cores() {
  int cores = std::max(1u, std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = std::max(1, CPU_COUNT(&set));
  return static_cast<int>(
      std::ceil(std::min<double>(cores, ReadContainerLimits().cpus.value_or(cores))));
}

void AddCluster(CLI::App* app, CommandLine* line, RawOptions* raw) {
  app->add_option("--coordinator", line->worker.coordinator,
                  "address of the coordinator's control listener")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  app->add_option("--secret_file", raw->secret_file,
                  "file with the cluster's shared secret (16 to 1024 characters)")
      ->required()
      ->type_name("FILE");
  app->add_option("--name", line->worker.name,
                  "name of this worker: unique in the cluster, the same after a restart")
      ->check([](const std::string& name) {
        return name.empty() ? std::string("must not be empty") : std::string();
      })
      ->type_name("NAME")
      ->capture_default_str();
}

void AddLocation(CLI::App* app, CommandLine* line) {
  const auto limit = [](const std::string& text) {
    return text.size() <= 128 ? std::string() : std::string("has more than 128 characters");
  };
  LocationOptions& location = line->worker.location;
  app->add_option("--host_id", location.host_id,
                  "name of this machine, the same for all its workers: ranks of one machine are "
                  "neighbours, requests prefer the workers of one machine, and GPUs of machines "
                  "with different names do not exchange by copy engines")
      ->check(limit)
      ->type_name("ID")
      ->default_str("the kernel's boot id");
  app->add_option("--accelerator_domain", location.accelerator_domain,
                  "name of the set of GPUs that NVLink connects; orders ranks")
      ->check(limit)
      ->type_name("ID")
      ->default_str("the machine");
  app->add_option("--slot", location.slot,
                  "position of this worker's device in its machine; orders the machine's ranks")
      ->type_name("N")
      ->default_str("GPU: its NUMA node and PCI address; CPU: none, so names order the ranks");
  app->add_option("--zone", location.zone,
                  "failure domain of this machine, such as its rack: machines of one zone are "
                  "neighbours in the ring")
      ->check(limit)
      ->type_name("NAME");
}

void AddResources(CLI::App* app, CommandLine* line, RawOptions* raw) {
  app->add_option("--device", line->backend.device,
                  "cpu, cuda:N or auto. auto: cuda:<local_rank> if the machine has a GPU for each "
                  "of the local_workers, else cpu")
      ->check([](const std::string& name) {
        return std::string(ParseDeviceName(name).status().message());
      })
      ->type_name("DEVICE")
      ->capture_default_str();
  app->add_option(
         "--threads", raw->threads,
         "CPU: compute threads; 0: cores of the machine (or container) / local_workers, at least 1")
      ->check(CLI::Range(0, 4096))
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--local_workers", line->backend.local_workers,
                  "number of workers on this machine; affects defaults only")
      ->check(CLI::Range(1, 4096))
      ->type_name("N")
      ->capture_default_str();
  app->add_option(
         "--local_rank", line->backend.local_rank,
         "index of this worker among the local_workers; affects --device=auto and --ring_interface")
      ->check(CLI::Range(0, 4095))
      ->type_name("N")
      ->capture_default_str();
  AddSize(app, "--memory_limit", &line->worker.memory_limit_bytes, 0, kMaxMemoryBytes,
          "memory that requests may reserve, such as 12GiB; 0: CPU: 80% of the memory of the "
          "machine (or container) / local_workers; GPU: 90% of the GPU's free memory")
      ->default_str("0");
  AddSize(app, "--max_kv_cache_bytes", &line->worker.max_kv_cache_bytes, 0, kMaxMemoryBytes,
          "memory that K/V caches may reserve, a part of --memory_limit; 0: no caches")
      ->default_str("half of --memory_limit");
  app->add_option("--nccl_max_ctas", line->backend.nccl_max_ctas,
                  "GPU: maximum number of SMs for NCCL's transfers; 0: 4")
      ->check(CLI::Range(0, 64))
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--nccl_library", line->backend.nccl_library,
                  "GPU: path of libnccl.so.2; empty: $RINGATTN_NCCL, else the loader's search path")
      ->type_name("FILE");
  app->add_option("--ring_transport", line->backend.ring_transport,
                  "transport between workers. GPU: peer: copy engines, within one machine; nccl: "
                  "NCCL, never encrypted; wire: TCP, with TLS if --cluster_tls_cert is given; "
                  "peer+nccl, peer+wire: peer between GPUs that are on one machine and reach each "
                  "other, else nccl or wire, also within one ring, and without peer if there is "
                  "only one local worker; auto: peer+nccl if the workers are on one machine or all "
                  "have RDMA and none has --cluster_tls_cert, else peer+wire. CPU: wire: as above; "
                  "auto: wire; gloo: TCP by Gloo, never encrypted")
      ->check(CLI::IsMember({"auto", "peer", "nccl", "wire", "peer+nccl", "peer+wire", "gloo"}))
      ->type_name("NAME")
      ->capture_default_str();
  app->add_option("--wire_connections", line->backend.wire_connections,
                  "wire: TCP connections to each other worker, 1 to 8; of two workers, the smaller "
                  "number counts; 0: 2 for CPUs; for GPUs 4, or 8 with --cluster_tls_cert")
      ->check(CLI::Range(0, 8))
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--peer_memory", line->backend.peer_memory,
                  "GPU: how workers on one machine share memory for peer. vmm: cuMemCreate "
                  "descriptors, across containers that see the GPUs; ipc: CUDA's legacy handles, "
                  "within one PID namespace; auto: vmm if the driver supports it, else ipc")
      ->check(CLI::IsMember({"auto", "vmm", "ipc"}))
      ->type_name("KIND")
      ->capture_default_str();
  app->add_option("--peer_socket_dir", line->backend.peer_socket_dir,
                  "GPU: folder for the sockets of workers in several containers on this machine, "
                  "mounted under the same path in all of them; empty: workers share a network "
                  "namespace. If set, --ring_transport=auto uses peer with one local worker too")
      ->check([](const std::string& folder) {
        return folder.empty() || folder[0] == '/' ? "" : "must be an absolute path";
      })
      ->type_name("FOLDER");
  app->add_flag("--shared_gpu", line->backend.shared_gpu,
                "GPU, for tests of rings on few GPUs: workers on one GPU exchange by copy engines, "
                "too; without it they exchange over a network");
  app->add_flag("--late_keys,!--no_late_keys", line->worker.ring.late_keys,
                "GPU: kernels that support it may start before the keys of their ring step have "
                "arrived, and wait for them; --no_late_keys: each step has a separate kernel call")
      ->capture_default_str();
  app->add_option("--kernel_family", line->backend.kernel_family,
                  "GPU, for debugging: the only kernel family to use; requests that it cannot "
                  "serve are rejected; auto: for each request the first suitable family")
      ->check(CLI::IsMember({"auto", "sm90", "sm80", "simt"}))
      ->type_name("NAME")
      ->capture_default_str();
  AddSize(app, "--pinned_pool", &line->backend.pinned_pool_bytes, int64_t{16} << 20,
          int64_t{1} << 40, "GPU: pinned memory between the wire and the device; at least 16MiB")
      ->default_str(absl::StrCat(line->backend.pinned_pool_bytes));
}

void AddListeners(CLI::App* app, CommandLine* line, RawOptions* raw) {
  app->add_option("--data_listen", line->worker.data_listen,
                  "address of the gRPC server for the coordinator (ShardService, health, "
                  "reflection); port 0 picks a free port")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  app->add_option("--metrics_listen", line->worker.metrics_listen,
                  "address of the HTTP server with Prometheus metrics at /metrics; port 0 picks a "
                  "free port; empty: none")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  app->add_option(
         "--health_listen", line->worker.health_listen,
         "address of a plain-text gRPC server with health only, for probes without TLS: liveness "
         "and readiness (member of a ring); port 0 picks a free port; empty: none")
      ->type_name("HOST:PORT");
  app->add_option("--ring_address", line->backend.ring_host,
                  "name or address of this machine at which other workers reach this one: for "
                  "rings over TCP (--ring_transport) while they form, and for probes")
      ->check([](const std::string& host) { return std::string(CheckRingAddress(host).message()); })
      ->type_name("HOST")
      ->capture_default_str();
  app->add_option("--ring_interface", raw->ring_interfaces,
                  "network interfaces whose address takes the place of --ring_address, such as "
                  "net1,net2: the worker with --local_rank=N uses number N modulo their count")
      ->delimiter(',')
      ->excludes("--ring_address")
      ->type_name("NAME[,NAME...]");
  app->add_option("--port_file", line->port_file,
                  "write the bound addresses to this file as JSON: "
                  "{\"data\",\"client_data\",\"metrics\",\"health\"}")
      ->type_name("FILE");
}

void AddClientPort(CLI::App* app, CommandLine* line) {
  app->add_option("--client_data_listen", line->worker.client_data_listen,
                  "address of the gRPC server for clients' direct streams; port 0 picks a free "
                  "port; empty: no direct streams")
      ->type_name("HOST:PORT");
  app->add_option("--client_data_address", line->worker.client_data_address,
                  "address under which clients reach --client_data_listen; default: as bound")
      ->type_name("HOST:PORT");
  app->add_option("--client_tls_cert", line->client_tls.certificate,
                  "TLS for --client_data_listen: PEM file with the server's certificate")
      ->type_name("FILE");
  app->add_option(
         "--client_tls_key", line->client_tls.key,
         "TLS for --client_data_listen: PEM file with the server's key, without a pass phrase")
      ->type_name("FILE");
  app->add_option("--client_tls_ca", line->client_tls.authorities,
                  "TLS for --client_data_listen: PEM file with the authorities of client "
                  "certificates; if given, clients must present a certificate")
      ->type_name("FILE");
}

// Rejects addresses that clients cannot reach and flags that have no effect.
void CheckClientPort(const CommandLine& line) {
  const WorkerOptions& worker = line.worker;
  const TlsFiles& tls = line.client_tls;
  if (worker.client_data_listen.empty()) {
    const auto refuse = [](const char* flag, const std::string& value) {
      if (value.empty()) return;
      throw CLI::ValidationError(flag, "has no effect without --client_data_listen");
    };
    refuse("--client_data_address", worker.client_data_address);
    refuse("--client_tls_cert", tls.certificate);
    refuse("--client_tls_key", tls.key);
    refuse("--client_tls_ca", tls.authorities);
    return;
  }
  const std::string host =
      worker.client_data_listen.substr(0, worker.client_data_listen.rfind(':'));
  const bool is_any = host.empty() || host == "0.0.0.0" || host == "[::]";
  if (is_any && worker.client_data_address.empty()) {
    throw CLI::ValidationError(
        "--client_data_listen",
        "is not an address that clients can connect to; set --client_data_address too");
  }
  if (tls.certificate.empty() != tls.key.empty()) {
    throw CLI::ValidationError("--client_tls_cert", "and --client_tls_key must be given together");
  }
  if (!tls.authorities.empty() && tls.certificate.empty()) {
    throw CLI::ValidationError("--client_tls_ca", "needs --client_tls_cert and --client_tls_key");
  }
  if (line.insecure || !tls.certificate.empty()) return;
  const absl::Status status = CheckPlainText("--client_data_listen", worker.client_data_listen,
                                             "--client_tls_cert and --client_tls_key");
  if (!status.ok()) throw CLI::ValidationError(std::string(status.message()));
}

void AddLocalMemory(CLI::App* app, CommandLine* line, RawOptions* raw) {
  app->add_option(
         "--local_memory", raw->local_memory,
         "whether clients on this machine may share memory with this worker. host_memory: host "
         "memory; cuda_memory: host memory and GPU memory (GPU workers only); off: neither")
      ->check(CLI::IsMember({"off", "host_memory", "cuda_memory"}))
      ->type_name("KIND")
      ->capture_default_str();
  app->add_option("--local_socket_dir", raw->local_socket_dir,
                  "existing folder for the Unix socket NAME.sock over which clients share memory; "
                  "clients must see it under the same path")
      ->type_name("FOLDER");
  app->add_option(
         "--local_uids", line->worker.local_uids,
         "numeric user ids whose processes may share memory; default: this worker's own user")
      ->delimiter(',')
      ->type_name("UID,...");
  app->add_option("--copy_threads", line->worker.copy_threads,
                  "threads that copy from clients' memory, and as many that copy to it")
      ->check(CLI::Range(1, 64))
      ->type_name("N")
      ->default_str("half of this worker's cores, 2 to 8");
  app->add_option(
         "--kv_spin_us", line->kv_spin_us,
         "microseconds that the worker and clients of its step rings (K/V caches over host "
         "memory) wait actively for a message before they sleep; 0: they sleep at once")
      ->check(CLI::Range(0, 1000000))
      ->type_name("N")
      ->default_str("200 with two spare cores per worker, else 0");
  AddSize(app, "--pin_local_memory", &raw->pin_local_memory, 0, kMaxMemoryBytes,
          "limit on the reused client memory to pin, so that GPUs copy from and to it directly; 0: "
          "none")
      ->default_str("half of the machine's memory");
  AddSize(app, "--max_imported_memory", &raw->max_imported_memory, 1, kMaxMemoryBytes,
          "limit on the client CUDA allocations to map at a time; with --local_memory=cuda_memory")
      ->default_str("2 TiB");
}

// Rejects flags that have no effect without each other, and resolves the defaults.
void ResolveLocalMemory(const RawOptions& raw, CommandLine* line) {
  if (raw.local_memory != "cuda_memory" && raw.max_imported_memory >= 0) {
    throw CLI::ValidationError(
        "--max_imported_memory",
        absl::StrCat("has no effect with --local_memory=", raw.local_memory));
  }
  if (raw.local_memory == "off") {
    if (!raw.local_socket_dir.empty()) {
      throw CLI::ValidationError("--local_socket_dir", "has no effect with --local_memory=off");
    }
    if (!line->worker.local_uids.empty()) {
      throw CLI::ValidationError("--local_uids", "has no effect with --local_memory=off");
    }
    if (raw.pin_local_memory >= 0) {
      throw CLI::ValidationError("--pin_local_memory", "has no effect with --local_memory=off");
    }
    return;
  }
  if (raw.local_socket_dir.empty() || raw.local_socket_dir[0] != '/') {
    throw CLI::ValidationError(
        "--local_socket_dir",
        absl::StrCat("must be an absolute path with --local_memory=", raw.local_memory));
  }
  if (raw.local_memory == "cuda_memory") {
    line->worker.max_imported_bytes =
        raw.max_imported_memory >= 0 ? raw.max_imported_memory : kUsualImportedBytes;
  }
  line->worker.max_pinned_bytes =
      raw.pin_local_memory >= 0 ? raw.pin_local_memory : MachineMemoryBytes() / 2;
  line->worker.local_socket_path = LocalSocketPath(raw.local_socket_dir, line->worker.name);
  if (line->worker.local_uids.empty()) line->worker.local_uids = {geteuid()};
}

void AddSecurity(CLI::App* app, CommandLine* line) {
  line->cluster_tls.AddTo(app);
  app->add_flag("--insecure", line->insecure,
                "allow plain text on addresses other than loopback: --data_listen, "
                "--client_data_listen, --coordinator");
  app->add_flag("--insecure_ring", line->backend.insecure_ring,
                "GPU: allow NCCL, which does not encrypt, between hosts although this worker has "
                "--cluster_tls_cert; must be given to all such workers of a ring");
}

// The secret and the tensors pass through both addresses.
absl::Status CheckSecurity(const CommandLine& line) {
  if (absl::Status status = line.cluster_tls.Check(); !status.ok()) return status;
  if (line.insecure || line.cluster_tls.given()) return absl::OkStatus();
  absl::Status status = CheckPlainText("--data_listen", line.worker.data_listen, kClusterTlsRemedy);
  status.Update(CheckPlainText("--coordinator", line.worker.coordinator, kClusterTlsRemedy));
  return status;
}

void AddTimeouts(CLI::App* app, CommandLine* line) {
  AddDuration(app, "--drain_timeout", &line->drain_timeout,
              "how long requests in progress may continue after SIGTERM");
  AddDuration(app, "--kv_orphan_time", &line->worker.kv_orphan_time,
              "how long K/V caches outlive the loss of the coordinator");
  AddDurationOrZero(app, "--prepared_lease", &line->worker.prepared_lease,
                    "how long an operation that has ended stays prepared for an equal request of "
                    "the same client; its memory is free to others meanwhile; 0: not at all");
  AddDuration(app, "--ring_step_timeout", &line->backend.ring_step_timeout,
              "time limit for the transfers of one ring step, including the time that peers take");
  AddDuration(app, "--ring_connect_timeout", &line->worker.ring.connect_timeout,
              "time limit for connecting to all peers when a ring forms; at most 65% of the "
              "coordinator's --control_timeout");
  AddDuration(
      app, "--teardown_timeout", &line->worker.ring.teardown_timeout,
      "time limit for ending a ring's work; when it passes, the process exits with code 70");
}

// Rejects flags that have no effect on a device named explicitly. With auto they apply if that
// device is selected.
void CheckDeviceFlags(const CLI::App& app, const BackendOptions& options,
                      const std::string& local_memory) {
  const auto refuse = [&app](const std::vector<const char*>& flags, const std::string& with) {
    for (const char* flag : flags) {
      if (app.get_option(flag)->count() == 0) continue;
      throw CLI::ValidationError(flag, absl::StrCat("has no effect with ", with));
    }
  };
  const std::string& transport = options.ring_transport;
  const std::string with_transport = absl::StrCat("--ring_transport=", transport);
  if (transport == "peer" || transport == "wire" || transport == "peer+wire") {
    refuse({"--nccl_max_ctas", "--nccl_library", "--insecure_ring"}, with_transport);
  }
  if (transport == "nccl" || transport == "wire") {
    refuse({"--peer_memory", "--peer_socket_dir", "--shared_gpu"}, with_transport);
  }
  if (transport == "peer" || transport == "nccl" || transport == "peer+nccl" ||
      transport == "gloo") {
    refuse({"--wire_connections"}, with_transport);
  }
  if (options.peer_memory == "ipc") refuse({"--peer_socket_dir"}, "--peer_memory=ipc");
  const absl::StatusOr<DeviceName> name = ParseDeviceName(options.device);
  if (!name.ok() || name->automatic) return;
  const std::string with = absl::StrCat("--device=", options.device);
  const bool for_cpu = transport == "gloo";
  const bool for_gpu = transport != "auto" && transport != "wire" && transport != "gloo";
  const bool is_gpu = name->kind == DeviceKind::kCuda;
  if (is_gpu ? for_cpu : for_gpu) {
    throw CLI::ValidationError("--ring_transport",
                               absl::StrCat(options.ring_transport, " has no effect with ", with));
  }
  if (is_gpu) return refuse({"--threads"}, with);
  refuse(
      {"--pinned_pool", "--peer_memory", "--peer_socket_dir", "--shared_gpu", "--nccl_max_ctas",
       "--nccl_library", "--kernel_family", "--late_keys", "--pin_local_memory", "--insecure_ring"},
      with);
  if (local_memory == "cuda_memory") {
    throw CLI::ValidationError("--local_memory",
                               absl::StrCat("cuda_memory has no effect with ", with,
                                            ": only GPU workers copy CUDA memory"));
  }
}

void Resolve(const RawOptions& raw, CommandLine* line) {
  line->worker.threads =
      raw.threads > 0 ? raw.threads : std::max(1, Cores() / line->backend.local_workers);
  line->backend.threads = line->worker.threads;
  line->cores = Cores();
  if (line->worker.copy_threads == 0) {
    line->worker.copy_threads = std::clamp(Cores() / (2 * line->backend.local_workers), 2, 8);
  }
  ResolveLocalMemory(raw, line);
  line->backend.ring_connect_timeout = line->worker.ring.connect_timeout;
  line->backend.host_id = line->worker.location.host_id;
  if (!raw.ring_interfaces.empty() && !line->check_flags) {
    const size_t index = line->backend.local_rank % raw.ring_interfaces.size();
    absl::StatusOr<std::string> address = AddressOfInterface(raw.ring_interfaces[index]);
    if (!address.ok()) {
      throw CLI::ValidationError("--ring_interface", std::string(address.status().message()));
    }
    line->backend.ring_host = *std::move(address);
  }
  line->worker.ring_host = line->backend.ring_host;
  absl::StatusOr<std::string> secret = ReadSecretFile(raw.secret_file);
  if (!secret.ok()) throw CLI::ValidationError("--secret_file", secret.status().ToString());
  line->worker.secret = *std::move(secret);
  if (raw.fault_injection.empty()) return;
  absl::StatusOr<FaultPlan> faults = ParseFaultPlan(raw.fault_injection);
  if (!faults.ok()) throw CLI::ValidationError("--fault_injection", faults.status().ToString());
  line->faults = *faults;
}

}  // namespace

absl::Duration KvSpin(const CommandLine& line, bool computes_on_cores) {
  if (line.kv_spin_us.has_value()) return absl::Microseconds(*line.kv_spin_us);
  const int threads = computes_on_cores ? line.backend.threads : 0;
  const bool has_spare_cores = line.cores / line.backend.local_workers >= threads + 2;
  return has_spare_cores ? kKvSpin : absl::ZeroDuration();
}

absl::StatusOr<TransportSecurity> OpenClientSecurity(const CommandLine& line) {
  if (line.client_tls.certificate.empty()) return TransportSecurity();
  const bool asks = !line.client_tls.authorities.empty();
  return TransportSecurity::Tls(
      {.files = line.client_tls,
       .peers = asks ? ClientCertificates::kRequired : ClientCertificates::kNone});
}

CommandLine ParseCommandLine(int argc, char** argv) {
  CommandLine line;
  RawOptions raw;
  line.worker.name = "worker-0";
  line.worker.coordinator = "127.0.0.1:7701";
  line.backend.pinned_pool_bytes = int64_t{256} << 20;
  line.worker.copy_threads = 0;  // 0: the default
  CLI::App app(
      "ringattn-worker: one worker of a ringattn cluster. It owns one device, registers with the "
      "coordinator, and computes shards of attention requests in a ring with the other "
      "workers.\nOn SIGTERM or SIGINT it leaves the ring when its current requests have ended, or "
      "after --drain_timeout. A second signal ends it at once.");
  app.set_version_flag("--version", std::string(kVersion));
  AddCluster(&app, &line, &raw);
  AddLocation(&app, &line);
  AddResources(&app, &line, &raw);
  AddListeners(&app, &line, &raw);
  AddClientPort(&app, &line);
  AddLocalMemory(&app, &line, &raw);
  AddSecurity(&app, &line);
  AddTimeouts(&app, &line);
  AddLogLevel(&app, &line.log_level);
  app.add_flag("--check_flags", line.check_flags, "check the flags, print errors, and exit");
  app.add_option("--fault_injection", raw.fault_injection,
                 "fault to inject, for tests: stall_step:N, skip_send:N, fail_send:N, "
                 "stop_reading:N, stop_sending:N, slow_step_ms:M or workspace:M")
      ->type_name("FAULT");
  try {
    ParseArguments(&app, argc, argv);
    CheckDeviceFlags(app, line.backend, raw.local_memory);
    if (absl::Status status = CheckSecurity(line); !status.ok()) {
      throw CLI::ValidationError(std::string(status.message()));
    }
    CheckClientPort(line);
    Resolve(raw, &line);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : kUsageExitCode);
  }
  return line;
}

}  // namespace ringattn::worker
