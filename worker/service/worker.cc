#include "worker/service/worker.h"

#include <atomic>
#include <chrono>
#include <random>
#include <utility>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/limits.h"
#include "common/base/version.h"
#include "common/local_memory/local_socket.h"
#include "common/observability/log.h"
#include "common/process/descriptors.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"
#include "common/wire/listener_metrics.h"
#include "common/wire/transport.h"
#include "worker/service/descriptor_shares.h"

namespace ringattn::worker {
namespace {

// How long open exchanges may continue to send when the worker stops.
constexpr std::chrono::milliseconds kServerShutdown{500};

std::string NewIncarnation() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
}

void LogLocation(const v1::WorkerLocation& location) {
  std::vector<std::string> interfaces;
  for (const v1::NetworkInterface& interface : location.interfaces()) {
    interfaces.push_back(
        absl::StrCat(interface.name(), " ", absl::StrJoin(interface.addresses(), " ")));
  }
  LogInfo("location", {{"host", location.host()},
                       {"accelerator_domain", location.accelerator_domain()},
                       {"slot", location.has_slot() ? absl::StrCat(location.slot()) : ""},
                       {"zone", location.zone()},
                       {"interfaces", absl::StrJoin(interfaces, "; ")}});
  if (!location.host().empty()) return;
  LogWarning(
      "the kernel has no boot id, so the host is unknown; set --host_id if the cluster has several "
      "hosts");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(
    WorkerOptions options, Device* device, RingTransport* transport,
    std::function<void(const std::string&)> on_leave,
    std::function<void(const std::string&)> on_stuck) {
  // The hooks need the worker, which does not exist yet. No client knows the socket before it does.
  auto self = std::make_shared<std::atomic<Worker*>>(nullptr);
  std::unique_ptr<LocalMemory> local_memory;
  if (!options.local_socket_path.empty()) {
    auto started = LocalMemory::Start(
        {.socket_path = options.local_socket_path,
         .uids = options.local_uids,
         .copy_threads = options.copy_threads,
         .device = device,
         .max_pinned_bytes = options.max_pinned_bytes,
         .max_imported_bytes = options.max_imported_bytes,
         .max_sockets = ShareDescriptors(DescriptorLimit()).local_sockets},
        {.send =
             [self](v1::JoinRequest message) { self->load()->control_->Send(std::move(message)); },
         .on_uploaded =
             [self](const OperationInfo& info) { self->load()->core_.OnInputsComplete(info); },
         .await_no_peers =
             [self](absl::Time deadline) {
               return self->load()->core_.registry().WaitUntilNoPeers(deadline);
             },
         .on_received_bytes = [self](int64_t n) { self->load()->metrics_.CountCopiedIn(n); },
         .on_sent_bytes = [self](int64_t n) { self->load()->metrics_.CountCopiedOut(n); },
         .on_imported_in_bytes = [self](int64_t n) { self->load()->metrics_.CountImportedIn(n); },
         .on_imported_out_bytes = [self](int64_t n) { self->load()->metrics_.CountImportedOut(n); },
         .on_downloaded =
             [self](absl::Duration t) { self->load()->metrics_.CountDownloadCopies(t); },
         .on_regions = [self](size_t n) { self->load()->metrics_.SetRegions(n); },
         .on_pinned_bytes = [self](int64_t n) { self->load()->metrics_.SetPinnedBytes(n); },
         .on_imported_bytes = [self](int64_t n) { self->load()->metrics_.SetImportedBytes(n); },
         .on_refused =
             [self](AttachCode code) {
               if (self->load() != nullptr) self->load()->metrics_.CountRefusedAttach(code);
             }});
    if (!started.ok()) return started.status();
    local_memory = *std::move(started);
  }
  std::unique_ptr<Worker> worker(new Worker(std::move(options), std::move(local_memory), device,
                                            transport, std::move(on_stuck)));
  self->store(worker.get());
  if (absl::Status status = worker->Listen(device->description()); !status.ok()) return status;
  worker->Join(*device, std::move(on_leave));
  return worker;
}

Worker::Worker(WorkerOptions options, std::unique_ptr<LocalMemory> local_memory, Device* device,
               RingTransport* transport, std::function<void(const std::string&)> on_stuck)
    : options_(std::move(options)),
      local_memory_(std::move(local_memory)),
      direct_streams_(MakeDirectStreams()),
      core_(
          CoreOptions(), device, transport, &metrics_,
          [this](v1::JoinRequest message) { control_->Send(std::move(message)); },
          std::move(on_stuck)),
      shard_service_(&core_.registry(), options_.secret,
                     {[this](const OperationInfo& info) { core_.OnUploaded(info); },
                      [this](int64_t bytes) { metrics_.CountReceived(bytes); },
                      [this](int64_t bytes) { metrics_.CountSent(bytes); },
                      [this](absl::Duration time) { metrics_.CountDownloadCopies(time); }}),
      kv_relay_service_(&core_.kv_store(), options_.secret, MakeStepHooks(/*direct=*/false)),
      kv_direct_service_(&core_.kv_store(), "", MakeStepHooks(/*direct=*/true), MakeRingOptions()) {
}

WorkerCoreOptions Worker::CoreOptions() {
  WorkerCoreOptions core;
  core.name = options_.name;
  core.memory_limit_bytes = options_.memory_limit_bytes;
  core.kernel_rates = options_.kernel_rates;
  core.ring = options_.ring;
  core.on_membership = [this](bool member) { SetReady(member); };
  core.local_memory = local_memory_.get();
  core.direct_streams = direct_streams_.get();
  core.max_kv_cache_bytes = options_.max_kv_cache_bytes >= 0 ? options_.max_kv_cache_bytes
                                                             : options_.memory_limit_bytes / 2;
  core.kv_orphan_time = options_.kv_orphan_time;
  core.prepared_lease = options_.prepared_lease;
  return core;
}

StepHooks Worker::MakeStepHooks(bool direct) {
  StepHooks hooks;
  hooks.on_step = [this] { metrics_.CountKvStep(); };
  hooks.on_call = [this](absl::Duration time) { metrics_.CountKvCall(time); };
  hooks.on_refused = [this](const std::string& reason) { metrics_.CountKvRefusal(reason); };
  hooks.on_received_bytes = [this, direct](int64_t bytes) {
    direct ? metrics_.CountDirectIn(bytes) : metrics_.CountReceived(bytes);
  };
  hooks.on_sent_bytes = [this, direct](int64_t bytes) {
    direct ? metrics_.CountDirectOut(bytes) : metrics_.CountSent(bytes);
  };
  hooks.on_ring_received_bytes = [this](int64_t bytes) { metrics_.CountCopiedIn(bytes); };
  hooks.on_ring_sent_bytes = [this](int64_t bytes) { metrics_.CountCopiedOut(bytes); };
  return hooks;
}

StepRingOptions Worker::MakeRingOptions() {
  StepRingOptions rings;
  rings.spin = options_.kv_spin;
  rings.on_rings = [this](int64_t count) { metrics_.SetStepRings(count); };
  rings.on_request = [this](bool slept) { metrics_.CountStepRingRequest(slept); };
  if (local_memory_ == nullptr) return rings;
  rings.find_region = [this](const std::string& id) { return local_memory_->Find(id); };
  return rings;
}

Worker::~Worker() { Stop(); }

void Worker::Leave(absl::Duration timeout) {
  core_.kv_store().SetLeaving();
  control_->Leave(timeout);
}

void Worker::Stop() {
  if (control_ != nullptr) control_->Stop();
  core_.kv_store().Close();
  if (local_memory_ != nullptr) local_memory_->Stop();
  const auto end = std::chrono::system_clock::now() + kServerShutdown;
  if (client_port_ != nullptr) client_port_->Stop(end);
  if (listener_ != nullptr) listener_->Stop();
  if (server_ != nullptr) server_->Shutdown(end);
}

std::unique_ptr<DirectStreams> Worker::MakeDirectStreams() {
  if (options_.client_data_listen.empty()) return nullptr;
  return std::make_unique<DirectStreams>(
      DirectStreamsOptions(),
      DirectStreamsHooks{
          .send = [this](v1::JoinRequest message) { control_->Send(std::move(message)); },
          .on_refused = [this](StreamRefusal refusal) { metrics_.CountRefusedStream(refusal); }});
}

absl::Status Worker::ListenForClients() {
  if (direct_streams_ == nullptr) return absl::OkStatus();
  auto port =
      ClientPort::Start({.listen = options_.client_data_listen,
                         .security = options_.client_security,
                         .max_connections = ShareDescriptors(DescriptorLimit()).client_connections,
                         .services = {&kv_direct_service_}},
                        direct_streams_.get(),
                        {[this](const OperationInfo& info) { core_.OnUploaded(info); },
                         [this](int64_t bytes) { metrics_.CountDirectIn(bytes); },
                         [this](int64_t bytes) { metrics_.CountDirectOut(bytes); },
                         [this](absl::Duration time) { metrics_.CountDownloadCopies(time); }});
  if (!port.ok()) return port.status();
  client_port_ = *std::move(port);
  return absl::OkStatus();
}

void Worker::SetReady(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus(wire::kReadinessName, ready);
  if (health_ == nullptr) return;
  health_->SetServing("", ready);
  health_->SetServing(wire::kReadinessName, ready);
}

absl::Status Worker::Listen(const std::string& device_description) {
  metrics_.Describe(options_.name, device_description, kVersion, options_.memory_limit_bytes);
  if (!options_.health_listen.empty()) {
    auto health = wire::HealthListener::Start(options_.health_listen);
    if (!health.ok()) return health.status();
    health_ = *std::move(health);
    health_address_ = health_->address();
  }
  metrics_.ExportTls(options_.security);
  if (options_.export_transport) metrics_.Export(options_.export_transport);
  if (!options_.metrics_listen.empty()) {
    absl::StatusOr<std::string> metrics_address = metrics_.Serve(options_.metrics_listen);
    if (!metrics_address.ok()) return metrics_address.status();
    metrics_address_ = *std::move(metrics_address);
  }

  if (absl::Status status = ListenForClients(); !status.ok()) return status;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  absl::StatusOr<std::unique_ptr<wire::Listener>> listener = wire::Listener::Bind(
      {.address = options_.data_listen,
       .max_connections = ShareDescriptors(DescriptorLimit()).data_connections});
  if (!listener.ok()) return listener.status();
  listener_ = *std::move(listener);
  grpc::ServerBuilder builder;
  listener_->AddTo(&builder, options_.security.ServerCredentials());
  builder.SetMaxReceiveMessageSize(static_cast<int>(MaxServedMessageBytes(Limits())));
  wire::SetTransport(&builder);
  builder.RegisterService(&shard_service_);
  builder.RegisterService(&kv_relay_service_);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr)
    return absl::UnavailableError("the gRPC server of the worker cannot start");
  listener_->Start();
  wire::ListenerMetrics::Listeners listeners = {{"data", listener_.get()}};
  if (client_port_ != nullptr) listeners.emplace_back("clients", &client_port_->listener());
  metrics_.ExportListeners(listeners);
  server_->GetHealthCheckService()->SetServingStatus(v1::ShardService::service_full_name(), true);
  server_->GetHealthCheckService()->SetServingStatus(wire::kLivenessName, true);
  SetReady(false);
  data_address_ = listener_->address();
  return absl::OkStatus();
}

void Worker::Join(const Device& device, std::function<void(const std::string&)> on_leave) {
  ControlClientOptions control;
  control.coordinator = options_.coordinator;
  control.secret = options_.secret;
  control.security = options_.security;
  control.registration.set_name(options_.name);
  control.registration.set_incarnation(NewIncarnation());
  control.registration.set_device(device.description());
  control.registration.set_memory_bytes(options_.memory_limit_bytes);
  control.registration.set_threads(options_.threads);
  control.registration.set_data_address(data_address_);
  control.registration.set_metrics_address(metrics_address_);
  for (const KernelRate& rate : options_.kernel_rates) {
    *control.registration.add_kernel_rates() = ToProto(rate);
  }
  metrics_.ExpectKernels(device.served_calls());
  for (const std::string& option : device.served_options()) {
    control.registration.add_options(option);
  }
  const TuningChoices offer = device.tuning_offer();
  v1::TuningChoices* tuning = control.registration.mutable_tuning();
  tuning->mutable_tile_q()->Add(offer.tile_q.begin(), offer.tile_q.end());
  tuning->mutable_tile_kv()->Add(offer.tile_kv.begin(), offer.tile_kv.end());
  tuning->mutable_key_splits()->Add(offer.key_splits.begin(), offer.key_splits.end());
  control.registration.set_local_socket(options_.local_socket_path);
  control.registration.set_takes_cuda_memory(options_.max_imported_bytes > 0 &&
                                             device.imports_memory());
  if (client_port_ != nullptr) {
    control.registration.set_client_data_address(options_.client_data_address.empty()
                                                     ? client_port_->address()
                                                     : options_.client_data_address);
  }
  if (!options_.local_socket_path.empty()) control.registration.set_host_id(HostId());
  if (!options_.ring_host.empty()) {
    absl::StatusOr<std::unique_ptr<ReachListener>> probes =
        ReachListener::Start(options_.ring_host);
    // Rings report the same fault when they form.
    if (probes.ok()) {
      reach_listener_ = *std::move(probes);
      control.registration.set_probe_address(reach_listener_->address());
    } else {
      LogWarning("no probes", {{"reason", std::string(probes.status().message())}});
    }
  }
  *control.registration.mutable_location() = MakeLocation(options_.location, options_.device_slot);
  LogLocation(control.registration.location());
  control.registration.set_preempts(device.preempts());
  control.registration.set_runs_inline(true);
  SetSeconds(options_.call_overhead_seconds, control.registration.mutable_call_overhead());
  control.registration.set_version(kVersion);
  control_ = std::make_unique<ControlClient>(std::move(control));
  control_->Start(
      {[this](v1::JoinResponse message) { core_.OnMessage(std::move(message)); },
       [this](const std::string& reason) { core_.OnDisconnected(reason); },
       [this] {
         metrics_.UpdateListeners();
         return core_.MakeHeartbeat();
       },
       std::move(on_leave),
       [this](v1::Register* registration) { core_.kv_store().AddHeldCaches(registration); },
       [this] { core_.kv_store().OnRegistered(); }});
}

}  // namespace ringattn::worker
