#include "server/edge/housekeeping.h"

#include "common/process/descriptors.h"
#include "common/wire/allocator.h"

namespace ringattn::server {

Housekeeping::Housekeeping(const HousekeepingOptions& options, Metrics* metrics,
                           Listeners listeners)
    : options_(options) {
  auto& connections =
      metrics->Gauges("ringattn_open_connections", "Open connections, by listener.");
  auto& refused =
      metrics->Counters("ringattn_refused_connections_total",
                        "Connections refused because the listener's bound was reached.");
  auto& failed =
      metrics->Counters("ringattn_failed_accepts_total",
                        "Failures to accept a connection, for lack of descriptors or memory.");
  for (const auto& [name, listener] : listeners) {
    const prometheus::Labels labels = {{"listener", name}};
    ports_.push_back(
        {listener, &connections.Add(labels), &refused.Add(labels), &failed.Add(labels), {}});
  }
  open_descriptors_ =
      &metrics->Gauges("ringattn_open_descriptors", "File descriptors of this process.").Add({});
  resident_bytes_ =
      &metrics->Gauges("ringattn_resident_bytes", "Resident memory of this process.").Add({});
  trims_ = &metrics
                ->Counters("ringattn_memory_trims_total",
                           "Times that freed memory was returned to the kernel.")
                .Add({});
  metrics->Gauges("ringattn_max_descriptors", "Limit on this process's file descriptors.")
      .Add({})
      .Set(DescriptorLimit());
  thread_ = std::thread([this] { Run(); });
}

Housekeeping::~Housekeeping() {
  stop_.Notify();
  thread_.join();
}

void Housekeeping::Run() {
  while (true) {
    Look();
    if (stop_.WaitFor(options_.interval)) return;
  }
}

void Housekeeping::Look() {
  for (Port& port : ports_) {
    const wire::ListenerStats stats = port.listener->Stats();
    port.connections->Set(stats.open);
    port.refused->Increment(stats.refused - port.seen.refused);
    port.failed_accepts->Increment(stats.failed_accepts - port.seen.failed_accepts);
    port.seen = stats;
  }
  if (const int64_t count = OpenDescriptors(); count >= 0) open_descriptors_->Set(count);
  const int64_t keep = busy_ ? options_.max_free_bytes : options_.max_free_bytes_idle;
  if (wire::FreedBytes() > keep) {
    wire::ReleaseFreedMemory();
    trims_->Increment();
  }
  if (const int64_t bytes = ResidentBytes(); bytes >= 0) resident_bytes_->Set(bytes);
}

}  // namespace ringattn::server
