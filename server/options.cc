#include "server/options.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/version.h"
#include "common/process/command_arguments.h"
#include "common/process/duration_flag.h"
#include "common/process/log_level_flag.h"
#include "common/process/loopback.h"
#include "common/process/plain_text.h"
#include "common/process/size_flag.h"

namespace ringattn::server {
namespace {

// Accepts 1 to `most`. Shape limits can only be lowered, because limits.h proves that products do
// not overflow for the defaults.
template <typename T>
void AddCount(CLI::App* app, const std::string& name, T* target, T most, const std::string& help) {
  app->add_option(name, *target, absl::StrCat(help, " [", *target, "]"))
      ->check(CLI::Range(T{1}, most))
      ->type_name("N");
}

// The same for a number of bytes; units are accepted.
void AddBytes(CLI::App* app, const std::string& name, int64_t* target, int64_t least, int64_t most,
              const std::string& help) {
  AddSize(app, name, target, least, most, absl::StrCat(help, " [", *target, "]"));
}

void AddListeners(CLI::App* app, CommandLine* line) {
  const char* group = "Listeners (port 0 picks a free one)";
  ServerOptions& server = line->server;
  const auto listener = [&](const char* name, std::string* target, const char* help) {
    app->add_option(name, *target, help)
        ->type_name("HOST:PORT")
        ->capture_default_str()
        ->group(group);
  };
  listener("--listen", &server.listen,
           "public gRPC: AttentionService, KvCacheService, ClusterService");
  listener("--control_listen", &server.control_listen,
           "control gRPC: workers and AdminService, with the secret; keep it private");
  listener("--metrics_listen", &server.metrics_listen,
           "HTTP: Prometheus metrics at /metrics; empty: disabled");
  listener("--health_listen", &server.health_listen,
           "plain-text gRPC health only, for probes without TLS: liveness, readiness; empty: "
           "disabled");
  app->add_option("--secret_file", line->secret_file,
                  "file with the cluster's shared secret (16 to 1024 characters)")
      ->required()
      ->type_name("FILE")
      ->group(group);
  app->add_option("--port_file", line->port_file,
                  "once bound, write {\"listen\",\"control\",\"metrics\",\"health\"} as JSON here")
      ->type_name("FILE")
      ->group(group);
}

void AddLimits(CLI::App* app, CommandLine* line) {
  auto* group = app->add_option_group("Limits", "Limits, as GetServerInfo reports them");
  Limits& limits = line->server.core.limits;
  AddCount(group, "--single_device_threshold_tokens", &limits.single_device_threshold_tokens,
           limits.max_tokens,
           "largest request, in tokens, that runs on one device unless the client chooses a plan");
  AddBytes(group, "--default_host_link_bytes_per_second",
           &limits.default_host_link_bytes_per_second, 1, int64_t{1} << 50,
           "rate between two hosts, per direction, that the planner assumes until the ring has "
           "measured it");
  AddCount(group, "--max_queued_requests", &limits.max_queued_requests, int64_t{1} << 16,
           "limit on queued requests");
  AddBytes(group, "--max_queued_bytes", &limits.max_queued_bytes, 1, int64_t{1} << 60,
           "limit on the input bytes of queued requests");
  AddBytes(group, "--max_residual_bytes", &limits.max_residual_bytes, 0, int64_t{1} << 60,
           "limit on the worker memory used by residuals, summed over workers; requests that "
           "need the memory evict residuals; 0: none are kept");
  AddDuration(group, "--default_residual_ttl", &limits.default_residual_ttl,
              "lifetime of a residual if the Forward sets none");
  AddDuration(group, "--max_residual_ttl", &limits.max_residual_ttl,
              "longest lifetime of a residual");
  AddDuration(group, "--residual_hold_ttl", &limits.residual_hold_ttl,
              "time without renewal after which held residuals expire");
  AddDuration(group, "--residual_hold_grace", &limits.residual_hold_grace,
              "time that residuals are kept after their HoldResiduals stream ends");
  AddCount(group, "--max_kv_caches", &limits.max_kv_caches, int64_t{1} << 20,
           "limit on K/V caches of all clients together");
  AddBytes(group, "--max_kv_cache_bytes", &limits.max_kv_cache_bytes, 0, int64_t{1} << 60,
           "limit on the bytes of one client's K/V caches, summed over workers, unless the "
           "clients file sets another; 0: only the workers' own limits");
  AddDuration(group, "--default_kv_ttl", &limits.default_kv_ttl,
              "lease of a K/V cache if CreateCache sets none");
  AddDuration(group, "--max_kv_ttl", &limits.max_kv_ttl, "longest lease of a K/V cache");
  AddBytes(group, "--max_request_bytes", &limits.max_request_bytes, 1, limits.max_request_bytes,
           "limit on the bytes of inputs and outputs of one request");
  AddCount(group, "--max_tokens", &limits.max_tokens, limits.max_tokens,
           "limit on the sequence length of one request");
  AddBytes(group, "--max_transport_bytes", &line->server.max_transport_bytes, 1, int64_t{1} << 50,
           "limit on gRPC's own buffers; calls end when it is reached");
  group
      ->add_option("--max_connections", line->server.max_connections,
                   "limit on public connections; further ones are rejected with a reason; 0: what "
                   "the limit on file descriptors leaves room for, at most 10000")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  group
      ->add_option(
          "--callback_threads", line->callback_threads,
          "threads that serve calls while tensors pass through the coordinator; otherwise two "
          "serve, or one with two processors; default: a quarter of 16 or more processors")
      ->check(CLI::Range(wire::kLeastCallbackThreads, wire::kMostCallbackThreads))
      ->type_name("N")
      ->capture_default_str();
  AddCount(group, "--max_watchers", &line->server.topology.max_watchers, size_t{1} << 16,
           "limit on open WatchTopology streams");
  AddCount(group, "--max_reflection_threads", &line->server.max_reflection_threads, 1024,
           "threads for server reflection, one per stream, a few of which gRPC itself uses");
  AddDuration(group, "--min_ping_interval", &line->server.min_ping_interval,
              "shortest interval of keepalive pings, with or without an open call");
  AddCount(group, "--max_queued_requests_per_client", &limits.max_queued_requests_per_client,
           int64_t{1} << 20, "limit per client: a principal, or a connection without one");
  AddDuration(group, "--planning_time_max", &limits.planning_time_max,
              "limit on the time to plan one request");
  AddDuration(group, "--upload_idle_timeout", &limits.upload_idle_timeout,
              "an upload for which the client sends nothing for this long, although it could, "
              "ends and frees its memory");
  AddDuration(group, "--header_timeout", &limits.header_timeout,
              "time within which a call's header must arrive");
  AddDuration(group, "--writer_join_timeout", &limits.writer_join_timeout,
              "time from the first writer of a request until all have joined");
  AddBytes(group, "--min_upload_bytes_per_second", &limits.min_upload_bytes_per_second, 1, kGiB,
           "an upload that lags behind this rate by --upload_grace ends and frees its memory");
  AddDuration(group, "--upload_grace", &limits.upload_grace, "see --min_upload_bytes_per_second");
  AddDuration(group, "--upload_grace_contended", &limits.upload_grace_contended,
              "replaces --upload_grace while other requests are queued");
  AddCount(group, "--max_streams_per_client", &limits.max_streams_per_client, int64_t{1} << 16,
           "limit on open calls of one client: a principal, or a connection without one");
  AddCount(group, "--max_streams_per_connection", &limits.max_streams_per_connection,
           int64_t{1} << 16, "limit on open calls of one connection");
  AddCount(group, "--max_streams_without_header", &limits.max_streams_without_header,
           int64_t{1} << 16, "limit on open calls without a header; the oldest is ended");
  AddDuration(
      group, "--download_idle_timeout", &limits.download_idle_timeout,
      "a download of which the client reads nothing for this long ends and frees its memory");
  AddDuration(group, "--default_deadline", &limits.default_deadline,
              "deadline of requests that have none");
  AddDuration(group, "--max_deadline", &limits.max_deadline, "longest deadline of a request");
}

void AddTimeouts(CLI::App* app, CommandLine* line) {
  auto* group = app->add_option_group("Workers", "Workers and the ring");
  CoordinatorConfig& core = line->server.core;
  AddDuration(group, "--heartbeat_interval", &core.heartbeat_interval,
              "interval of workers' heartbeats");
  AddDuration(group, "--heartbeat_timeout", &core.heartbeat_timeout,
              "a worker without a message for this long is lost");
  AddDuration(group, "--progress_timeout", &core.progress_timeout,
              "time without progress after which an operation's worker is stuck (minimum; grows "
              "with the predicted step time)");
  AddDuration(
      group, "--transfer_timeout", &core.transfer_timeout,
      "a live worker that takes no bytes of an upload for this long is lost; one that sends "
      "none of a result is lost three --download_idle_timeout later");
  AddDuration(group, "--control_timeout", &core.control_timeout,
              "time within which a worker must answer a command");
  AddDuration(group, "--teardown_timeout", &core.teardown_timeout,
              "time within which a worker must leave a broken ring");
  AddDurationOrZero(group, "--loss_drain_timeout", &core.loss_drain_timeout,
                    "after the loss of a worker, time for which requests on other workers may "
                    "run on before the next ring forms; 0: they end with the loss");
  AddDuration(group, "--blame_window", &core.blame_window,
              "time for which evidence of the faulty worker is gathered");
  AddDuration(group, "--forming_delay", &core.forming_delay,
              "time to wait for more workers before a ring is formed");
  AddDuration(group, "--ring_wait_max", &core.ring_wait_max,
              "time that requests wait for a ring before they fail with UNAVAILABLE");
  AddDuration(group, "--replacement_time_max", &core.replacement_time_max,
              "time after a loss in which requests for more workers than are left fail with "
              "UNAVAILABLE (retry)");
  AddDuration(group, "--assembly_time_max", &core.assembly_time_max, "the same, after the start");
  AddDuration(group, "--newcomer_hold_max", &core.newcomer_hold_max,
              "longest time that new requests wait so that a new worker can join the ring");
  AddDuration(group, "--kv_orphan_time", &core.kv_orphan_time,
              "after a restart of the coordinator, a K/V cache is lost unless all its workers join "
              "again within this time");
  AddDuration(group, "--retry_after", &core.retry_after, "RetryInfo sent to clients");
  AddCount(group, "--max_operations_per_worker", &core.max_operations_per_worker, 1024,
           "requests that hold memory on one worker at a time; a quarter of these slots is for "
           "small ones");
  AddDuration(group, "--run_ahead_max", &core.run_ahead_max,
              "a run is sent to a worker that is predicted to be busy for at most this long; later "
              "requests cannot overtake it");
  AddDuration(group, "--preempt_after", &core.preempt_after,
              "a run gives way to small requests of one worker and then computes for at least this "
              "long; runs predicted to be shorter do not give way");
  AddDuration(group, "--run_time_floor", &core.run_time_floor,
              "a run that takes longer than this and 20 times its prediction is ended");
}

void AddSecurity(CLI::App* app, CommandLine* line) {
  const char* group = "Security (files are reloaded when they change)";
  const auto file = [&](const char* name, std::string* target, const char* help) {
    app->add_option(name, *target, help)->type_name("FILE")->group(group);
  };
  file("--tls_cert", &line->client_tls.certificate,
       "certificate of the public listener, PEM, followed by its chain to an authority; enables "
       "TLS on it");
  file("--tls_key", &line->client_tls.key, "private key for --tls_cert, PEM without a pass phrase");
  file("--tls_client_ca", &line->client_tls.authorities,
       "authorities, PEM: clients must present a certificate of one of them; with "
       "--clients_file, a token suffices instead");
  file("--clients_file", &line->server.clients_file,
       "JSON: known clients with tokens' SHA-256, certificates, weights and quotas "
       "(docs/security.md). All other callers are rejected");
  file("--audit_log", &line->server.audit_log,
       "append a JSON line per ended request to this file; -: standard output");
  app->add_flag("--insecure", line->insecure, "allow plain text on addresses other than loopback")
      ->group(group);
  line->cluster_tls.AddTo(app);
}

// Returns the errors that are detectable before any file is opened.
absl::Status CheckSecurity(const CommandLine& line) {
  const TlsFiles& tls = line.client_tls;
  if (tls.certificate.empty() != tls.key.empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key go together");
  }
  if (tls.certificate.empty() && !tls.authorities.empty()) {
    return absl::InvalidArgumentError("--tls_client_ca needs --tls_cert and --tls_key");
  }
  if (absl::Status status = line.cluster_tls.Check(); !status.ok()) return status;
  // Without TLS, tokens are readable on the network, even with --insecure.
  if (tls.certificate.empty() && !line.server.clients_file.empty() &&
      !IsLoopback(line.server.listen)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--clients_file: tokens would travel in plain text to --listen=", line.server.listen,
        ", which is not a loopback address: give --tls_cert and --tls_key"));
  }
  if (line.insecure) return absl::OkStatus();
  if (tls.certificate.empty()) {
    absl::Status status =
        CheckPlainText("--listen", line.server.listen, "--tls_cert and --tls_key");
    if (!status.ok()) return status;
  }
  if (line.cluster_tls.given()) return absl::OkStatus();
  return CheckPlainText("--control_listen", line.server.control_listen, kClusterTlsRemedy);
}

}  // namespace

absl::Status OpenSecurity(CommandLine* line) {
  if (!line->client_tls.certificate.empty()) {
    const bool asks = !line->client_tls.authorities.empty();
    const bool has_tokens = !line->server.clients_file.empty();
    absl::StatusOr<TransportSecurity> security =
        TransportSecurity::Tls({.files = line->client_tls,
                                .peers = !asks        ? ClientCertificates::kNone
                                         : has_tokens ? ClientCertificates::kOptional
                                                      : ClientCertificates::kRequired});
    if (!security.ok()) return security.status();
    line->server.client_security = *std::move(security);
  }
  absl::StatusOr<TransportSecurity> cluster = line->cluster_tls.Open();
  if (!cluster.ok()) return cluster.status();
  line->server.cluster_security = *std::move(cluster);
  return absl::OkStatus();
}

CommandLine ParseCommandLine(int argc, char** argv) {
  CommandLine line;
  CLI::App app(
      "ringattn-server: the coordinator of ringattn. Takes attention requests over gRPC, "
      "shards them over a ring of workers and streams the results back.\n"
      "SIGTERM or SIGINT drains and exits: new requests fail with UNAVAILABLE (RetryInfo); those "
      "in "
      "flight may continue for --drain_timeout and then fail with UNAVAILABLE. A second one exits "
      "immediately.\nExits with 71 if its public port does not recover (--dead_after), to be "
      "restarted.");
  app.set_version_flag("--version", std::string(kVersion));
  AddListeners(&app, &line);
  AddSecurity(&app, &line);
  AddLimits(&app, &line);
  AddTimeouts(&app, &line);
  AddDuration(&app, "--drain_timeout", &line.drain_timeout,
              "time for which requests in flight may continue after SIGTERM");
  AddDuration(&app, "--dead_after", &line.server.liveness.dead_after,
              "exit with 71 after the public port has not answered for this long; the health "
              "service reports \"liveness\" as NOT_SERVING before");
  AddLogLevel(&app, &line.log_level);
  app.add_flag("--check_flags", line.check_flags,
               "check these flags, report errors and exit; start nothing");
  try {
    ParseArguments(&app, argc, argv);
    if (absl::Status status = CheckSecurity(line); !status.ok()) {
      throw CLI::ValidationError(std::string(status.message()));
    }
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : kUsageExitCode);
  }
  // Several probes must fail before the process reacts.
  LivenessOptions& liveness = line.server.liveness;
  liveness.interval = std::min(liveness.interval, liveness.dead_after / 6);
  liveness.probe_timeout = std::min(liveness.probe_timeout, liveness.dead_after / 6);
  liveness.unhealthy_after = liveness.dead_after / 3;
  return line;
}

}  // namespace ringattn::server
