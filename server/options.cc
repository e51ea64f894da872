#include "server/options.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/version.h"
#include "common/process/duration_flag.h"
#include "common/process/log_level_flag.h"
#include "common/process/loopback.h"
#include "common/process/plain_text.h"

namespace ringattn::server {
namespace {

// 1 to `most`. Shape limits may only be lowered: limits.h proves that no product
// overflows for those that it has.
template <typename T>
void AddCount(CLI::App* app, const std::string& name, T* target, T most, const std::string& help) {
  app->add_option(name, *target, absl::StrCat(help, " [", *target, "]"))
      ->check(CLI::Range(T{1}, most))
      ->type_name("N");
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
  listener("--listen", &server.listen, "public gRPC: AttentionService, ClusterService");
  listener("--control_listen", &server.control_listen,
           "control gRPC: workers and AdminService, with the secret; keep it private");
  listener("--metrics_listen", &server.metrics_listen,
           "HTTP: Prometheus metrics at /metrics; empty for none");
  listener("--health_listen", &server.health_listen,
           "plain-text gRPC health alone, for probes that speak no TLS: liveness, readiness; empty "
           "for none");
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
           "up to this many tokens a request runs on one device unless told otherwise");
  AddCount(group, "--max_queued_requests", &limits.max_queued_requests, int64_t{1} << 16,
           "requests that may wait");
  AddCount(group, "--max_queued_bytes", &limits.max_queued_bytes, int64_t{1} << 60,
           "input bytes of the requests that may wait");
  group
      ->add_option("--max_residual_bytes", limits.max_residual_bytes,
                   "what Forwards may leave on all workers together for Backwards; requests that "
                   "need the memory get it; 0: nothing is kept")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 60))
      ->type_name("N")
      ->capture_default_str();
  AddDuration(group, "--default_residual_ttl", &limits.default_residual_ttl,
              "how long, unless the Forward says");
  AddDuration(group, "--max_residual_ttl", &limits.max_residual_ttl, "how long at most");
  AddDuration(group, "--residual_hold_ttl", &limits.residual_hold_ttl,
              "how long a client that holds residuals may be silent before they expire");
  AddDuration(group, "--residual_hold_grace", &limits.residual_hold_grace,
              "how long they outlive the end of a HoldResiduals stream");
  AddCount(group, "--max_request_bytes", &limits.max_request_bytes, limits.max_request_bytes,
           "inputs and outputs of one request");
  AddCount(group, "--max_tokens", &limits.max_tokens, limits.max_tokens,
           "sequence length of one request");
  AddCount(group, "--max_transport_bytes", &line->server.max_transport_bytes, int64_t{1} << 50,
           "bytes of gRPC's own buffers; calls end when they are full");
  group
      ->add_option("--max_connections", line->server.max_connections,
                   "public connections at a time, further ones are refused with a reason; 0: what "
                   "the limit on file descriptors leaves room for, at most 10000")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  AddCount(group, "--max_watchers", &line->server.topology.max_watchers, size_t{1} << 16,
           "WatchTopology streams at a time");
  AddCount(group, "--max_reflection_threads", &line->server.max_reflection_threads, 1024,
           "streams of server reflection at a time, less a few, each of which has a thread");
  AddDuration(group, "--min_ping_interval", &line->server.min_ping_interval,
              "a client may ping (keepalive) this often, with a call or without");
  AddCount(group, "--max_queued_requests_per_client", &limits.max_queued_requests_per_client,
           int64_t{1} << 20, "of one principal, or of one connection without one");
  AddDuration(group, "--planning_time_max", &limits.planning_time_max, "for one request's plan");
  AddDuration(group, "--upload_idle_timeout", &limits.upload_idle_timeout,
              "an upload of which the client sends nothing for this long, though it could, gives "
              "its memory back");
  AddDuration(group, "--header_timeout", &limits.header_timeout,
              "a call's header must come within this");
  AddCount(group, "--min_upload_bytes_per_second", &limits.min_upload_bytes_per_second, kGiB,
           "an upload that falls behind this rate by --upload_grace gives its memory back");
  AddDuration(group, "--upload_grace", &limits.upload_grace, "see --min_upload_bytes_per_second");
  AddDuration(group, "--upload_grace_contended", &limits.upload_grace_contended,
              "instead of --upload_grace while other requests wait in the queue");
  AddCount(group, "--max_streams_per_client", &limits.max_streams_per_client, int64_t{1} << 16,
           "calls that one client (who it authenticated as, else its connection) may have open");
  AddCount(group, "--max_streams_per_connection", &limits.max_streams_per_connection,
           int64_t{1} << 16, "calls that may be open on one connection");
  AddCount(group, "--max_streams_without_header", &limits.max_streams_without_header,
           int64_t{1} << 16, "calls that may be open without a header; the oldest makes room");
  AddDuration(group, "--download_idle_timeout", &limits.download_idle_timeout,
              "a download of which the client takes nothing for this long gives its memory back");
  AddDuration(group, "--default_deadline", &limits.default_deadline,
              "for requests that come without one");
  AddDuration(group, "--max_deadline", &limits.max_deadline, "for all others");
}

void AddTimeouts(CLI::App* app, CommandLine* line) {
  auto* group = app->add_option_group("Workers", "Workers and the ring");
  CoordinatorConfig& core = line->server.core;
  AddDuration(group, "--heartbeat_interval", &core.heartbeat_interval, "how often workers report");
  AddDuration(group, "--heartbeat_timeout", &core.heartbeat_timeout,
              "a worker silent for this long is lost");
  AddDuration(group, "--progress_timeout", &core.progress_timeout,
              "an operation that is stalled this long has a stuck worker (at least; grows "
              "with the predicted step time)");
  AddDuration(group, "--transfer_timeout", &core.transfer_timeout,
              "a worker that reports but takes no bytes of an upload for this long is lost; one "
              "that sends none of a result, three --download_idle_timeout later");
  AddDuration(group, "--control_timeout", &core.control_timeout,
              "a worker must answer a command within this");
  AddDuration(group, "--teardown_timeout", &core.teardown_timeout,
              "a worker must leave a broken ring within this");
  AddDuration(group, "--blame_window", &core.blame_window,
              "how long evidence is gathered of who broke the ring");
  AddDuration(group, "--forming_delay", &core.forming_delay,
              "wait this long for more workers before forming a ring");
  AddDuration(group, "--ring_wait_max", &core.ring_wait_max,
              "requests wait this long for a ring, then fail with UNAVAILABLE");
  AddDuration(group, "--replacement_time_max", &core.replacement_time_max,
              "after a loss, requests for more workers than are left are told to retry for this "
              "long");
  AddDuration(group, "--assembly_time_max", &core.assembly_time_max, "likewise from the start");
  AddDuration(group, "--newcomer_hold_max", &core.newcomer_hold_max,
              "new requests wait at most this long so that a newcomer can join the ring");
  AddDuration(group, "--retry_after", &core.retry_after, "what clients are told to wait");
  AddCount(group, "--max_operations_per_worker", &core.max_operations_per_worker, 1024,
           "requests that hold memory on one worker at a time; a quarter of these places is for "
           "small ones");
  AddDuration(group, "--run_ahead_max", &core.run_ahead_max,
              "a run is sent to workers that will compute for this long yet; what comes meanwhile "
              "cannot go before it");
  AddDuration(group, "--run_time_floor", &core.run_time_floor,
              "a run that takes longer, and 20 times as long as predicted, is ended");
}

void AddSecurity(CLI::App* app, CommandLine* line) {
  const char* group = "Who may call, and over what (files are read again when they change)";
  const auto file = [&](const char* name, std::string* target, const char* help) {
    app->add_option(name, *target, help)->type_name("FILE")->group(group);
  };
  file("--tls_cert", &line->client_tls.certificate,
       "the public listener speaks TLS with this certificate, PEM, followed by those that lead to "
       "an authority");
  file("--tls_key", &line->client_tls.key, "its key, PEM without a pass phrase");
  file("--tls_client_ca", &line->client_tls.authorities,
       "authorities, PEM: clients are asked for a certificate of theirs. Required; with "
       "--clients_file a token does as well");
  file("--clients_file", &line->server.clients_file,
       "JSON: known clients with tokens' SHA-256, certificates, weights and quotas "
       "(docs/security.md). Nobody else is served");
  file("--audit_log", &line->server.audit_log,
       "append a JSON line for each request that ended; - for standard output");
  app->add_flag("--insecure", line->insecure,
                "listen in plain text on addresses other than loopback")
      ->group(group);
  line->cluster_tls.AddTo(app);
}

// What is refused before anything is opened.
absl::Status CheckSecurity(const CommandLine& line) {
  const TlsFiles& tls = line.client_tls;
  if (tls.certificate.empty() != tls.key.empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key go together");
  }
  if (tls.certificate.empty() && !tls.authorities.empty()) {
    return absl::InvalidArgumentError("--tls_client_ca needs --tls_cert and --tls_key");
  }
  if (absl::Status status = line.cluster_tls.Check(); !status.ok()) return status;
  // Tokens can be read where there is no TLS, whatever --insecure says.
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
                                .peers = !asks        ? PeerProof::kNone
                                         : has_tokens ? PeerProof::kOptional
                                                      : PeerProof::kRequired});
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
      "ringattn-server: the coordinator of ringattn. Takes attention requests over gRPC, cuts "
      "them over a ring of workers and streams the results back.\n"
      "SIGTERM or SIGINT drains and ends: new requests get UNAVAILABLE with RetryInfo, those in "
      "flight may go on for --drain_timeout and then end with UNAVAILABLE. A second one ends at "
      "once.\nExits with 71 if its public port stays dead (--dead_after), to be started again.");
  app.set_version_flag("--version", std::string(kVersion));
  AddListeners(&app, &line);
  AddSecurity(&app, &line);
  AddLimits(&app, &line);
  AddTimeouts(&app, &line);
  AddDuration(&app, "--drain_timeout", &line.drain_timeout,
              "on SIGTERM, requests in flight may go on for this long");
  AddDuration(&app, "--dead_after", &line.server.liveness.dead_after,
              "exit with 71 once the public port has not answered for this long; the health "
              "service's name liveness says NOT_SERVING before");
  AddLogLevel(&app, &line.log_level);
  app.add_flag("--check_flags", line.check_flags,
               "say what is wrong with these flags, or exit with 0; start nothing");
  try {
    app.parse(argc, argv);
    if (absl::Status status = CheckSecurity(line); !status.ok()) {
      throw CLI::ValidationError(std::string(status.message()));
    }
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : kUsageExitCode);
  }
  // Several probes before anything is concluded from them.
  LivenessOptions& liveness = line.server.liveness;
  liveness.interval = std::min(liveness.interval, liveness.dead_after / 6);
  liveness.probe_timeout = std::min(liveness.probe_timeout, liveness.dead_after / 6);
  liveness.unhealthy_after = liveness.dead_after / 3;
  return line;
}

}  // namespace ringattn::server
