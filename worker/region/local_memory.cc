#include "worker/region/local_memory.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "common/wire/durations.h"

namespace ringattn::worker {
namespace {

// a few milliseconds of page faults
constexpr int64_t kPopulateBytes = 16 * kMiB;

}  // namespace

std::string LocalSocketPath(const std::string& folder, const std::string& worker_name) {
  std::string file;
  for (const char c : worker_name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_';
    file.push_back(plain ? c : '_');
  }
  // With the prefix "/proc/self/fd/N/" the path must fit into a socket address.
  return absl::StrCat(folder, "/", file.substr(0, 64), ".sock");
}

absl::StatusOr<std::unique_ptr<LocalMemory>> LocalMemory::Start(LocalMemoryOptions options,
                                                                LocalMemoryHooks hooks) {
  std::unique_ptr<LocalMemory> memory(new LocalMemory(std::move(options), std::move(hooks)));
  LocalMemory* const self = memory.get();
  auto listener = RegionListener::Start(
      {.socket_path = self->options_.socket_path,
       .uids = self->options_.uids,
       .max_unattached = static_cast<size_t>(self->options_.max_sockets / 9),
       .max_regions =
           static_cast<size_t>(self->options_.max_sockets - self->options_.max_sockets / 9),
       .device = self->options_.max_imported_bytes > 0 ? self->options_.device : nullptr,
       .max_imported_bytes = self->options_.max_imported_bytes},
      {.on_attached = [self](const std::shared_ptr<Region>& r,
                             size_t n) { self->OnAttached(r, n); },
       .on_gone = [self](const std::shared_ptr<Region>& r, size_t n) { self->OnGone(r, n); },
       .on_refused = self->hooks_.on_refused,
       .on_imported_bytes = self->hooks_.on_imported_bytes});
  if (!listener.ok()) return listener.status();
  memory->listener_ = *std::move(listener);
  return memory;
}

LocalMemory::LocalMemory(LocalMemoryOptions options, LocalMemoryHooks hooks)
    : options_(std::move(options)),
      hooks_(std::move(hooks)),
      reporter_(hooks_.send, options_.report_interval),
      up_(options_.copy_threads),
      down_(options_.copy_threads) {
  transfer_hooks_.on_uploaded = [this](const OperationInfo& info) {
    reporter_.Uploaded(info);
    hooks_.on_uploaded(info);
  };
  transfer_hooks_.on_delivered = [this](const OperationInfo& info) { reporter_.Delivered(info); };
  transfer_hooks_.on_failed = [this](const OperationInfo& info, bool released,
                                     const std::string& why) {
    reporter_.Failed(info, released ? TransferEnd::kRegionReleased : TransferEnd::kWorkerError,
                     why);
  };
  transfer_hooks_.on_received_bytes = hooks_.on_received_bytes;
  transfer_hooks_.on_sent_bytes = hooks_.on_sent_bytes;
  transfer_hooks_.on_imported_in_bytes = hooks_.on_imported_in_bytes;
  transfer_hooks_.on_imported_out_bytes = hooks_.on_imported_out_bytes;
  transfer_hooks_.on_downloaded = hooks_.on_downloaded;
  if (options_.device != nullptr && options_.max_pinned_bytes > 0) {
    pinner_ = std::make_unique<RegionPinner>(options_.device, options_.max_pinned_bytes,
                                             hooks_.on_pinned_bytes, hooks_.await_no_peers);
  }
}

LocalMemory::~LocalMemory() { Stop(); }

void LocalMemory::Stop() {
  if (listener_ != nullptr) listener_->Stop();  // null if Start has failed
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  pinner_.reset();  // no further requests to pin
  reporter_.Stop();
}

void LocalMemory::Expect(const v1::ExpectRegion& expect) {
  listener_->Expect(expect.region_id(), expect.token(), static_cast<int64_t>(expect.bytes()),
                    MonotonicNow() + ToDuration(expect.valid_for()),
                    expect.kind() == v1::REGION_KIND_CUDA);
}

void LocalMemory::Forget(const v1::ForgetRegion& forget) { listener_->Forget(forget.region_id()); }

void LocalMemory::ForgetAll() { listener_->ForgetAll(); }

std::shared_ptr<Region> LocalMemory::Find(const std::string& region_id) const {
  return listener_->Find(region_id);
}

absl::StatusOr<std::shared_ptr<RegionTransfer>> LocalMemory::Make(
    const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve) {
  return RegionTransfer::Make(operation, reserve,
                              [this](const std::string& id) { return listener_->Find(id); },
                              &transfer_hooks_, {&up_, &down_});
}

std::shared_ptr<RegionTransfer> LocalMemory::MakeInline(
    const std::shared_ptr<ShardOperation>& operation, const v1::Reserve& reserve, bool host) {
  absl::StatusOr<std::shared_ptr<RegionTransfer>> made = Make(operation, reserve);
  if (!made.ok() || !(*made)->IsInline(host)) return nullptr;
  return *std::move(made);
}

void LocalMemory::ReportFailure(const OperationInfo& info, bool released, const std::string& why) {
  transfer_hooks_.on_failed(info, released, why);
}

void LocalMemory::Begin(const std::shared_ptr<ShardOperation>& operation,
                        const v1::Reserve& reserve) {
  auto made = Make(operation, reserve);
  if (!made.ok()) {
    return transfer_hooks_.on_failed(operation->info(), absl::IsCancelled(made.status()),
                                     std::string(made.status().message()));
  }
  std::shared_ptr<RegionTransfer> transfer = *std::move(made);
  {
    absl::MutexLock lock(&mutex_);
    transfers_.insert(transfer);
  }
  const RegionTransfer* const key = transfer.get();
  reporter_.Watch(key, operation->info(), [key] {
    return TransferCounts{key->received_bytes(), key->sent_bytes()};
  });
  transfer->Start([this, key] { OnOver(key); });
}

void LocalMemory::OnOver(const RegionTransfer* transfer) {
  reporter_.Unwatch(transfer);
  std::shared_ptr<RegionTransfer> over;  // destroyed after the lock is released
  absl::MutexLock lock(&mutex_);
  const auto found = std::find_if(transfers_.begin(), transfers_.end(),
                                  [transfer](const auto& each) { return each.get() == transfer; });
  if (found == transfers_.end()) return;
  over = *found;
  transfers_.erase(found);
  if (stopping_ || pinner_ == nullptr) return;
  for (const std::shared_ptr<Region>& region : over->Regions()) {
    if (!region->on_device()) pinner_->Schedule(region);
  }
}

void LocalMemory::OnAttached(const std::shared_ptr<Region>& region, size_t regions) {
  SendRegion(*region, true);
  hooks_.on_regions(regions);
  Populate(region, 0);
}

// Handles one slice at a time, so that operations get their turns in between.
void LocalMemory::Populate(const std::shared_ptr<Region>& region, int64_t offset) {
  if (region->on_device() || offset >= region->bytes()) return;
  up_.Add([this, weak = std::weak_ptr<Region>(region), offset] {
    const std::shared_ptr<Region> region = weak.lock();
    if (region == nullptr || region->released()) return;
    region->Populate(offset, kPopulateBytes);
    Populate(region, offset + kPopulateBytes);
  });
}

void LocalMemory::OnGone(const std::shared_ptr<Region>& region, size_t regions) {
  std::vector<std::shared_ptr<RegionTransfer>> transfers;
  {
    absl::MutexLock lock(&mutex_);
    transfers.assign(transfers_.begin(), transfers_.end());
  }
  for (const auto& transfer : transfers) transfer->OnRegionGone(*region);
  SendRegion(*region, false);
  hooks_.on_regions(regions);
}

void LocalMemory::SendRegion(const Region& region, bool attached) {
  v1::JoinRequest message;
  message.mutable_region_changed()->set_region_id(region.id());
  message.mutable_region_changed()->set_attached(attached);
  hooks_.send(std::move(message));
}

}  // namespace ringattn::worker
