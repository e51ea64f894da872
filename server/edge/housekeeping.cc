#include "server/edge/housekeeping.h"

#include "common/process/descriptors.h"
#include "common/wire/allocator.h"

namespace ringattn::server {

Housekeeping::Housekeeping(const HousekeepingOptions& options, Metrics* metrics,
                           const wire::ListenerMetrics::Listeners& listeners)
    : options_(options), listeners_(metrics, listeners) {
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
  listeners_.Update();
  if (const int64_t count = OpenDescriptors(); count >= 0) open_descriptors_->Set(count);
  const int64_t keep = busy_ ? options_.max_free_bytes : options_.max_free_bytes_idle;
  if (wire::FreedBytes() > keep) {
    wire::ReleaseFreedMemory();
    trims_->Increment();
  }
  if (const int64_t bytes = ResidentBytes(); bytes >= 0) resident_bytes_->Set(bytes);
}

}  // namespace ringattn::server
