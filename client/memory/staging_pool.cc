#include "client/memory/staging_pool.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

// Calls of slightly different size share a region.
constexpr int64_t kGranule = 2 << 20;
// Use at most this fraction of the free memory; the rest is the caller's.
constexpr int64_t kPartOfFreeMemory = 2;

int64_t Rounded(int64_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

std::string FirstWord(const char* path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

absl::Status TooMuch(int64_t bytes, absl::string_view what, int64_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat(bytes, " bytes are more than ", what, " (", limit, ")"));
}

}  // namespace

int64_t AvailableMemoryBytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  std::string name, unit;
  int64_t kib = 0;
  while (meminfo >> name >> kib && std::getline(meminfo, unit)) {
    if (name == "MemAvailable:") available = kib * 1024;
  }
  int64_t limit = 0, used = 0;
  if (absl::SimpleAtoi(FirstWord("/sys/fs/cgroup/memory.max"), &limit) &&
      absl::SimpleAtoi(FirstWord("/sys/fs/cgroup/memory.current"), &used)) {
    available = std::min(available, std::max<int64_t>(limit - used, 0));
  }
  return available;
}

StagingPool::StagingPool(StagingOptions options, std::function<SharedRegion::AttachCall()> attach,
                         std::shared_ptr<RegionIndex> index)
    : options_(options), attach_(std::move(attach)), index_(std::move(index)) {}

StagingPool::~StagingPool() {
  std::vector<std::shared_ptr<SharedRegion>> regions;
  {
    absl::MutexLock lock(&mutex_);
    for (Idle& idle : idle_) regions.push_back(std::move(idle.region));
    idle_.clear();
  }
  Drop(regions);
}

int64_t StagingPool::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

bool StagingPool::MayTake(int64_t bytes, std::string* why) const {
  absl::MutexLock lock(&mutex_);
  if (options_.max_bytes <= 0 || closed_) {
    *why = "staging is turned off";
  } else if (Rounded(bytes) > options_.max_bytes) {
    *why = std::string(TooMuch(bytes, "the limit of staging memory", options_.max_bytes).message());
  } else if (!refusal_.ok() && MonotonicNow() < refused_until_) {
    *why = std::string(refusal_.message());
  } else {
    return true;
  }
  return false;
}

absl::Status StagingPool::Refuse(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  probed_ = false;
  refusal_ = why;
  refused_until_ = MonotonicNow() + options_.refusal_kept;
  return why;
}

// Probes with one page, so that no memory is populated if no worker attaches it.
absl::Status StagingPool::Probe() {
  {
    absl::MutexLock lock(&mutex_);
    if (probed_) return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<SharedRegion>> page = SharedRegion::Make(1, attach_());
  if (!page.ok()) return page.status();
  (*page)->AwaitFirstRound(SharedRegion::kFirstRound);
  const bool taken = !(*page)->workers().empty();
  const std::string trouble = (*page)->trouble();
  (*page)->Stop();
  if (!taken) {
    return Refuse(absl::FailedPreconditionError(absl::StrCat(
        "no worker of this machine attached memory", trouble.empty() ? "" : ": ", trouble)));
  }
  absl::MutexLock lock(&mutex_);
  probed_ = true;
  refusal_ = absl::OkStatus();
  return absl::OkStatus();
}

// Takes the smallest idle region that is large enough.
std::shared_ptr<SharedRegion> StagingPool::TakeIdle(int64_t bytes) {
  auto best = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it) {
    // A region that no worker has attached expires, or is attached again.
    if (it->region->bytes() < bytes || it->region->workers().empty()) continue;
    if (best == idle_.end() || it->region->bytes() < best->region->bytes()) best = it;
  }
  if (best == idle_.end()) return nullptr;
  std::shared_ptr<SharedRegion> region = std::move(best->region);
  idle_.erase(best);
  return region;
}

std::shared_ptr<SharedRegion> StagingPool::TakeReady(int64_t bytes, bool* prepare) {
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<SharedRegion> region = TakeIdle(Rounded(bytes));
  *prepare = region == nullptr && misses_++ > 0 && !preparing_;
  if (*prepare) preparing_ = true;
  return region;
}

void StagingPool::Prepare(int64_t bytes) {
  auto region = Take(bytes);
  if (region.ok()) GiveBack(*std::move(region), /*reusable=*/true);
  absl::MutexLock lock(&mutex_);
  preparing_ = false;
}

void StagingPool::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

absl::StatusOr<std::shared_ptr<SharedRegion>> StagingPool::Take(int64_t bytes) {
  std::string why;
  if (!MayTake(bytes, &why)) return absl::ResourceExhaustedError(why);
  if (absl::Status status = Probe(); !status.ok()) return status;
  const int64_t wanted = Rounded(bytes);
  std::shared_ptr<SharedRegion> region;
  std::vector<std::shared_ptr<SharedRegion>> outgrown;
  absl::Status refused;
  {
    absl::MutexLock lock(&mutex_);
    region = TakeIdle(wanted);
    if (region == nullptr) {
      // Make room by freeing regions that are too small, the longest idle first.
      while (bytes_ + wanted > options_.max_bytes && !idle_.empty()) {
        bytes_ -= idle_.front().region->bytes();
        outgrown.push_back(std::move(idle_.front().region));
        idle_.erase(idle_.begin());
      }
      if (bytes_ + wanted > options_.max_bytes) {
        refused = TooMuch(wanted, "what is left of the limit of staging memory",
                          options_.max_bytes - bytes_);
      } else {
        bytes_ += wanted;
      }
    }
  }
  for (const auto& each : outgrown) {
    index_->Remove(each.get());
    each->Stop();
  }
  if (!refused.ok()) return refused;
  if (region == nullptr) {
    const int64_t free = AvailableMemoryBytes() / kPartOfFreeMemory;
    absl::StatusOr<std::shared_ptr<SharedRegion>> made =
        wanted > free ? TooMuch(wanted, "half of the free memory", free)
                      : SharedRegion::Make(wanted, attach_());
    if (!made.ok()) {
      absl::MutexLock lock(&mutex_);
      bytes_ -= wanted;
      return made.status();
    }
    region = *std::move(made);
    region->AwaitFirstRound(SharedRegion::kFirstRound);
    index_->Add(region);
  }
  if (!region->workers().empty()) return region;
  const std::string trouble = region->trouble();
  GiveBack(std::move(region), /*reusable=*/false);
  return Refuse(absl::FailedPreconditionError(
      absl::StrCat("the workers have released the region: ", trouble)));
}

void StagingPool::GiveBack(std::shared_ptr<SharedRegion> region, bool reusable) {
  if (!reusable) return Drop({std::move(region)});
  absl::MutexLock lock(&mutex_);
  idle_.push_back({std::move(region), MonotonicNow()});
}

void StagingPool::Trim() {
  const absl::Time old = MonotonicNow() - options_.idle;
  std::vector<std::shared_ptr<SharedRegion>> regions;
  {
    absl::MutexLock lock(&mutex_);
    const auto is_old = [&](const Idle& idle) { return idle.since <= old; };
    for (Idle& idle : idle_) {
      if (is_old(idle)) regions.push_back(idle.region);
    }
    idle_.erase(std::remove_if(idle_.begin(), idle_.end(), is_old), idle_.end());
  }
  Drop(regions);
}

void StagingPool::Drop(const std::vector<std::shared_ptr<SharedRegion>>& regions) {
  for (const auto& region : regions) {
    index_->Remove(region.get());
    region->Stop();
    absl::MutexLock lock(&mutex_);
    bytes_ -= region->bytes();
  }
}

}  // namespace ringattn::client
