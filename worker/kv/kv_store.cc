#include "worker/kv/kv_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/attention/tensors.h"
#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "common/kv/kv_error.h"
#include "common/observability/log.h"
#include "common/security/secret.h"
#include "common/wire/durations.h"

namespace ringattn::worker {
namespace {

// Why a cache's stream ends when the cache is freed. `leaving`: the worker was ordered to end.
absl::Status EndOf(const std::string& reason, bool leaving) {
  if (reason == "KV_DELETED" || reason == "KV_EXPIRED") {
    return KvError(absl::StatusCode::kFailedPrecondition, reason,
                   "the cache has ended; create another one and prefill it");
  }
  if (leaving && (reason.empty() || reason == "KV_LOST")) {
    return KvError(absl::StatusCode::kDataLoss, "KV_LOST",
                   "the worker was ordered to end, so the cache is lost; create another one and "
                   "prefill it");
  }
  return KvError(absl::StatusCode::kDataLoss, reason.empty() ? "KV_LOST" : reason,
                 "the cache is lost; create another one and prefill it");
}

absl::Status BadToken() {
  return absl::UnauthenticatedError("the token is not valid for a cache of this worker");
}

absl::Status Fenced(absl::string_view message) {
  return KvError(absl::StatusCode::kAborted, "KV_FENCED", message);
}

}  // namespace

void KvCache::Publish(absl::Time now, bool used) {
  const KvStepLog& log = shard_->log();
  absl::MutexLock lock(&mutex_);
  progress_.epoch = log.epoch();
  progress_.committed = log.committed();
  progress_.complete = log.complete();
  progress_.blocks_used = log.blocks().blocks_used();
  progress_.sequences = log.blocks().num_sequences();
  progress_.failure = std::string(shard_->lost().message());
  if (!used) return;
  progress_.last_use = now;
  progress_.unreported = true;
}

KvStore::KvStore(KvStoreOptions options, Device* device, MemoryBudget* budget,
                 std::function<void(v1::JoinRequest)> send)
    : options_([&] {
        if (options.now == nullptr) options.now = [] { return MonotonicNow(); };
        return std::move(options);
      }()),
      device_(device),
      budget_(budget),
      send_(std::move(send)),
      zeroing_("kv_zero") {
  std::unique_ptr<StepKernels> kernels;
  if (device->kv_caches() == nullptr) {
    auto made = device->MakeStepKernels();
    if (!made.ok()) {
      unserved_ = made.status();
      return;
    }
    kernels = *std::move(made);
  }
  engine_ = std::make_unique<KvEngine>(std::move(kernels));
  if (options_.tick_interval > absl::ZeroDuration()) ticker_ = std::thread([this] { Loop(); });
}

KvStore::~KvStore() { Close(); }

void KvStore::Close() {
  std::vector<std::string> ids;
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    for (const auto& [id, cache] : caches_) ids.push_back(id);
  }
  end_ticks_.Notify();
  if (ticker_.joinable()) ticker_.join();
  for (const std::string& id : ids) FreeOne(id, "KV_LOST");
  // What was started before may still send.
  (void)zeroing_.Start([] { return absl::OkStatus(); }, {}, HostQueue::OnFailure::kRun)
      ->Wait(absl::InfiniteFuture());
  if (engine_ != nullptr) engine_->Run([](StepKernels*) {});
}

void KvStore::Send(v1::JoinRequest message) {
  {
    absl::MutexLock lock(&mutex_);
    if (closing_) return;
  }
  send_(std::move(message));
}

void KvStore::Loop() {
  while (!end_ticks_.WaitFor(options_.tick_interval)) Tick();
}

std::shared_ptr<KvCache> KvStore::Find(const std::string& id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = caches_.find(id);
  return found == caches_.end() ? nullptr : found->second;
}

// ------------------------------------------------------------------------------ reserve and free

absl::Status KvStore::TakeScratch() {
  DeviceKvCaches* const caches = device_->kv_caches();
  absl::MutexLock lock(&mutex_);
  if (caches == nullptr || scratch_.bytes() > 0) return absl::OkStatus();
  auto taken = budget_->Take(caches->scratch_bytes());
  if (!taken.ok()) return taken.status();
  scratch_ = *std::move(taken);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<KvCache>> KvStore::Make(const v1::KvReserve& reserve) {
  if (engine_ == nullptr) return unserved_;
  absl::StatusOr<KvCacheSpec> spec = ParseKvCacheSpec(reserve.spec(), Limits());
  if (!spec.ok()) return absl::InvalidArgumentError(spec.status().message());
  const KvPlacement placement{static_cast<int>(reserve.placement().head_parts()),
                              static_cast<int>(reserve.placement().position_parts())};
  const int world_size = reserve.placement().members_size();
  if (world_size < 1 || placement.head_parts < 1 || placement.position_parts < 1 ||
      int64_t{placement.head_parts} * placement.position_parts != world_size ||
      reserve.rank() >= static_cast<uint32_t>(world_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "placement has ", world_size, " members, ", placement.head_parts, " head parts and ",
        placement.position_parts, " position parts; rank is ", reserve.rank()));
  }
  for (const KvLayerGroup& group : spec->groups) {
    if (group.num_kv_heads % placement.head_parts == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("placement.head_parts is ", placement.head_parts,
                                                   "; it must divide num_kv_heads, ",
                                                   group.num_kv_heads));
  }
  const int rank = static_cast<int>(reserve.rank());
  const int64_t bytes = KvBytesOfRank(*spec, placement, rank);
  auto cache = std::make_shared<KvCache>();
  {
    absl::MutexLock lock(&mutex_);
    if (closing_) return absl::UnavailableError("the worker is ending");
    if (bytes > options_.max_bytes - bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the cache needs ", bytes, " bytes; ", options_.max_bytes - bytes_,
                       " of --max_kv_cache_bytes, ", options_.max_bytes, ", are free"));
    }
  }
  if (absl::Status status = TakeScratch(); !status.ok()) return status;
  absl::StatusOr<MemoryBudget::Reservation> reservation = budget_->Take(bytes);
  if (!reservation.ok()) return reservation.status();
  auto shard = KvShard::Make(*std::move(spec), placement, rank, device_);
  if (!shard.ok()) return shard.status();
  if ((*shard)->bytes() > bytes) {
    auto tables = budget_->Take((*shard)->bytes() - bytes);
    if (!tables.ok()) return tables.status();
    cache->tables_ = *std::move(tables);
  }
  cache->reserve_ = reserve;
  cache->ttl_ = reserve.has_ttl() ? ToDuration(reserve.ttl()) : Limits().default_kv_ttl;
  cache->bytes_ = bytes;
  cache->shard_ = *std::move(shard);
  cache->reservation_ = *std::move(reservation);
  cache->progress_.last_use = options_.now();
  return cache;
}

void KvStore::SendReserved(const v1::KvReserve& reserve, const absl::Status& status,
                           int64_t bytes) {
  v1::JoinRequest message;
  v1::KvReserved* reserved = message.mutable_kv_reserved();
  reserved->set_cache_id(reserve.cache_id());
  reserved->set_ok(status.ok());
  reserved->set_reason(std::string(status.message()));
  reserved->set_bytes(static_cast<uint64_t>(bytes));
  reserved->set_malformed(absl::IsInvalidArgument(status));
  reserved->set_unsupported(absl::IsUnimplemented(status));
  Send(std::move(message));
}

void KvStore::Reserve(const v1::KvReserve& reserve) {
  if (const std::shared_ptr<KvCache> held = Find(reserve.cache_id())) {
    const bool same =
        held->reserve_.spec().SerializeAsString() == reserve.spec().SerializeAsString() &&
        held->reserve_.rank() == reserve.rank();
    const auto answer = [this, reserve, same, held] {
      held->zeroed_.WaitForNotification();
      SendReserved(reserve,
                   same ? absl::OkStatus()
                        : absl::InvalidArgumentError("another cache has the same cache_id"),
                   held->bytes_);
      return absl::OkStatus();
    };
    zeroing_.Start(answer, {}, HostQueue::OnFailure::kRun);
    return;
  }
  absl::StatusOr<std::shared_ptr<KvCache>> made = Make(reserve);
  if (!made.ok()) {
    LogWarning("cache refused", {{"reason", std::string(made.status().message())}});
    return SendReserved(reserve, made.status(), 0);
  }
  std::shared_ptr<KvCache> cache = *std::move(made);
  {
    absl::MutexLock lock(&mutex_);
    caches_.emplace(cache->id(), cache);
    bytes_ += cache->bytes_;
  }
  zeroing_.Start(
      [this, cache] {
        const bool zeroed = cache->shard_->Zero(cache->stop_);
        const absl::Status lost = cache->shard_->lost();
        if (zeroed || !lost.ok()) SendReserved(cache->reserve_, lost, cache->bytes_);
        cache->zeroed_.Notify();
        if (!lost.ok()) FreeOne(cache->id(), "KV_LOST");
        return absl::OkStatus();
      },
      {}, HostQueue::OnFailure::kRun);
}

void KvStore::Free(const v1::KvFree& free) {
  for (const std::string& id : free.cache_ids()) FreeOne(id, free.reason());
}

void KvStore::FreeOne(const std::string& id, const std::string& reason) {
  std::shared_ptr<KvCache> cache;
  std::shared_ptr<KvStream> stream;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = caches_.find(id);
    if (found == caches_.end()) return;
    cache = std::move(found->second);
    caches_.erase(found);
    stream = cache->stream_.lock();
  }
  cache->stop_.store(true);
  if (stream != nullptr) stream->End(EndOf(reason, leaving()));
  cache->zeroed_.WaitForNotification();
  engine_->Run([&](StepKernels*) {
    cache->shard_.reset();
    cache->reservation_ = {};
    cache->tables_ = {};
  });
  absl::MutexLock lock(&mutex_);
  bytes_ -= cache->bytes_;
}

// ------------------------------------------------------------------------------- open and settle

void KvStore::Open(const v1::KvOpen& open) {
  std::shared_ptr<KvCache> cache;
  std::shared_ptr<KvStream> stream;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = caches_.find(open.cache_id());
    if (found != caches_.end()) cache = found->second;
    if (cache != nullptr && open.epoch() > cache->opened_epoch_) {
      cache->opened_epoch_ = open.epoch();
      cache->settled_ = false;
      cache->token_ = open.token();
      cache->region_id_ = open.region_id();
      stream = cache->stream_.lock();
      cache->stream_.reset();
      // Ends what the earlier writer has computed here; set back before the log is opened.
      cache->stop_.store(true);
    }
  }
  if (stream != nullptr) stream->End(Fenced("another writer has opened the cache"));
  v1::JoinRequest message;
  v1::KvOpened* opened = message.mutable_kv_opened();
  opened->set_cache_id(open.cache_id());
  opened->set_epoch(open.epoch());
  if (cache == nullptr) {
    opened->set_missing(true);
    return Send(std::move(message));
  }
  engine_->Post([this, cache, message = std::move(message)](StepKernels*) mutable {
    KvShard* const shard = cache->shard();
    v1::KvOpened* opened = message.mutable_kv_opened();
    if (shard == nullptr || !shard->lost().ok()) {
      opened->set_missing(true);
    } else {
      cache->stop_.store(false);
      // An older epoch changes nothing; the answer names the newest one.
      (void)shard->log().Open(opened->epoch());
      opened->set_epoch(shard->log().epoch());
      opened->set_committed_step(shard->log().committed());
      opened->set_complete_step(shard->log().complete());
      cache->Publish(options_.now(), true);
    }
    Send(std::move(message));
  });
}

void KvStore::Settle(const v1::KvSettle& settle) {
  const std::shared_ptr<KvCache> cache = Find(settle.cache_id());
  v1::JoinRequest message;
  v1::KvSettled* settled = message.mutable_kv_settled();
  settled->set_cache_id(settle.cache_id());
  settled->set_epoch(settle.epoch());
  if (cache == nullptr) {
    settled->set_reason("this worker does not have the cache");
    return Send(std::move(message));
  }
  engine_->Post(
      [this, cache, step = settle.step(), message = std::move(message)](StepKernels*) mutable {
        v1::KvSettled* settled = message.mutable_kv_settled();
        absl::Status status = absl::NotFoundError("this worker does not have the cache");
        if (KvShard* const shard = cache->shard()) {
          status = shard->log().Settle(settled->epoch(), step);
          cache->Publish(options_.now(), true);
        }
        settled->set_ok(status.ok());
        settled->set_reason(std::string(status.message()));
        if (status.ok()) {
          absl::MutexLock lock(&mutex_);
          if (cache->opened_epoch_ == settled->epoch()) cache->settled_ = true;
        }
        Send(std::move(message));
      });
}

bool KvStore::IsTokenOf(const v1::StepHello& hello) const {
  const auto found = caches_.find(hello.cache_id());
  // Compared in any case, so that the time does not tell whether the cache exists.
  const std::string expected = found == caches_.end() ? std::string() : found->second->token_;
  return SecretsEqual(expected, hello.token()) && !expected.empty();
}

absl::Status KvStore::CheckToken(const v1::StepHello& hello) const {
  absl::MutexLock lock(&mutex_);
  return IsTokenOf(hello) ? absl::OkStatus() : BadToken();
}

absl::StatusOr<std::shared_ptr<KvCache>> KvStore::Attach(const v1::StepHello& hello,
                                                         bool with_token,
                                                         const std::shared_ptr<KvStream>& stream) {
  std::shared_ptr<KvStream> earlier;
  std::shared_ptr<KvCache> cache;
  {
    absl::MutexLock lock(&mutex_);
    if (with_token && !IsTokenOf(hello)) return BadToken();
    const auto found = caches_.find(hello.cache_id());
    if (found == caches_.end()) {
      return KvError(absl::StatusCode::kNotFound, "KV_NOT_FOUND",
                     "this worker does not have the cache");
    }
    cache = found->second;
    if (hello.rank() != cache->reserve_.rank()) {
      return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL",
                     absl::StrCat("hello.rank is ", hello.rank(), "; this worker has rank ",
                                  cache->reserve_.rank(), " of the cache"));
    }
    if (hello.epoch() != cache->opened_epoch_ || !cache->settled_) {
      return Fenced(absl::StrCat("hello.epoch is ", hello.epoch(), "; the newest epoch is ",
                                 cache->opened_epoch_,
                                 cache->settled_ ? "" : " and its log is not settled"));
    }
    if (hello.has_ring() &&
        (cache->region_id_.empty() || !SecretsEqual(cache->region_id_, hello.ring().region_id()))) {
      return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL",
                     "hello.ring.region_id is not OpenCacheRequest.region_id of this epoch");
    }
    earlier = cache->stream_.lock();
    cache->stream_ = stream;
  }
  if (earlier != nullptr) {
    earlier->End(Fenced("a later stream of the same epoch has replaced this one"));
  }
  return cache;
}

// ------------------------------------------------------------------------- coordinator and leases

void KvStore::OnDisconnected() {
  absl::MutexLock lock(&mutex_);
  if (!orphaned_since_.has_value()) orphaned_since_ = options_.now();
}

void KvStore::OnRegistered() {
  absl::MutexLock lock(&mutex_);
  orphaned_since_.reset();
}

void KvStore::AddHeldCaches(v1::Register* registration) {
  registration->set_max_kv_cache_bytes(static_cast<uint64_t>(max_bytes()));
  const absl::Time now = options_.now();
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, cache] : caches_) {
    const KvCache::Progress progress = cache->progress();
    v1::KvHeldCache* held = registration->add_kv_caches();
    *held->mutable_reserve() = cache->reserve_;
    held->set_epoch(std::max(progress.epoch, cache->opened_epoch_));
    held->set_committed_step(progress.committed);
    held->set_complete_step(progress.complete);
    SetDuration(std::max(absl::ZeroDuration(), progress.last_use + cache->ttl_ - now),
                held->mutable_lease_left());
  }
}

void KvStore::Tick() {
  const absl::Time now = options_.now();
  std::vector<std::string> orphans;
  std::vector<v1::JoinRequest> messages;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, cache] : caches_) {
      absl::MutexLock cache_lock(&cache->mutex_);
      KvCache::Progress& progress = cache->progress_;
      if (orphaned_since_.has_value()) {
        if (now >= *orphaned_since_ + std::min(options_.orphan_time, cache->ttl_)) {
          orphans.push_back(id);
        }
        continue;  // reported to the next coordinator
      }
      if (!progress.failure.empty()) {
        if (std::exchange(progress.failure_reported, true)) continue;
        v1::KvTouched* touched = messages.emplace_back().mutable_kv_touched();
        touched->set_cache_id(id);
        touched->set_failure(progress.failure);
        continue;
      }
      if (!progress.unreported || now < cache->next_report_) continue;
      cache->next_report_ = now + options_.report_interval;
      progress.unreported = false;
      v1::KvTouched* touched = messages.emplace_back().mutable_kv_touched();
      touched->set_cache_id(id);
      touched->set_epoch(progress.epoch);
      touched->set_step(progress.committed);
      touched->set_blocks_used(static_cast<uint64_t>(progress.blocks_used));
      touched->set_sequences(static_cast<uint64_t>(progress.sequences));
    }
  }
  for (v1::JoinRequest& message : messages) Send(std::move(message));
  for (const std::string& id : orphans) {
    LogWarning("cache freed: no coordinator has returned", {});
    FreeOne(id, "KV_LOST");
  }
}

int64_t KvStore::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(caches_.size());
}

int64_t KvStore::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace ringattn::worker
