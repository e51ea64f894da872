#include "client/api/kv_cache.h"

#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "client/api/error.h"
#include "client/call/client_impl.h"
#include "client/kv/kv_service.h"
#include "client/kv/kv_writer.h"
#include "common/base/limits.h"
#include "common/kv/cache_spec.h"
#include "common/kv/kv_error.h"
#include "common/wire/durations.h"

namespace ringattn::client {
namespace {

std::string RandomKvRequestId() {
  std::random_device random;
  return absl::StrFormat("kv-%08x%08x%08x%08x", random(), random(), random(), random());
}

}  // namespace

// Calls exclude one another by `mutex`; waiting calls hold it.
class KvCache::Impl {
 public:
  Impl(std::shared_ptr<const KvServiceCalls> service, std::shared_ptr<WorkerChannels> workers,
       SharedRegion::AttachCall attach, std::shared_ptr<CacheHold> hold,
       const v1::KvCacheInfo& info, KvCacheSpec parsed, KvOpenOptions options)
      : id(info.cache_id()),
        spec(ToProto(parsed)),
        bytes_per_worker(static_cast<int64_t>(info.bytes_per_worker())),
        service(service),
        hold(options.hold ? std::move(hold) : nullptr),
        writer(std::move(service), std::move(workers), std::move(attach), info.cache_id(),
               std::move(parsed), info.placement(), std::move(options)) {}

  // All calls use one connection, because the service lists an anonymous client's caches by it.
  template <typename ClientImpl>
  static std::shared_ptr<const KvServiceCalls> ServiceOf(ClientImpl& client) {
    return std::make_shared<const KvServiceCalls>(client.channels.front(), client.token,
                                                  client.client_options.retry.connect_timeout);
  }

  void Close() ABSL_LOCKS_EXCLUDED(mutex) {
    absl::MutexLock lock(&mutex);
    writer.CloseStreams();
    if (hold != nullptr) hold->Release({id});
    hold = nullptr;
  }

  const std::string id;
  const v1::KvCacheSpec spec;
  const int64_t bytes_per_worker;
  const std::shared_ptr<const KvServiceCalls> service;
  v1::KvPlacement placement;  // constant after opening: it belongs to the cache
  absl::Mutex mutex;
  std::shared_ptr<CacheHold> hold ABSL_GUARDED_BY(mutex);  // null: none
  KvWriter writer ABSL_GUARDED_BY(mutex);
};

KvCache::KvCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

KvCache::~KvCache() { Close(); }

absl::StatusOr<v1::CreateCacheResponse> KvCache::Reserve(Client* client,
                                                         const v1::KvCacheSpec& spec,
                                                         const KvCreateOptions& options) {
  if (auto parsed = ParseKvCacheSpec(spec, Limits()); !parsed.ok()) return parsed.status();
  v1::CreateCacheRequest request;
  request.set_request_id(options.request_id.empty() ? RandomKvRequestId() : options.request_id);
  *request.mutable_spec() = spec;
  if (options.ttl > absl::ZeroDuration()) SetDuration(options.ttl, request.mutable_ttl());
  if (options.world_size.has_value()) request.set_world_size(*options.world_size);
  request.mutable_members()->Add(options.members.begin(), options.members.end());
  request.set_divide_blocks(
      options.divide_blocks.value_or(!options.world_size.has_value() && options.members.empty()));
  return Impl::ServiceOf(*client->impl_)->Create(request, options.deadline);
}

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(Client* client,
                                                         const v1::KvCacheSpec& spec,
                                                         const KvCreateOptions& create,
                                                         const KvOpenOptions& open) {
  const auto created = Reserve(client, spec, create);
  if (!created.ok()) return created.status();
  auto cache = Open(client, created->cache_id(), open);
  // Without a request id, no other caller can find the cache.
  if (!cache.ok() && create.request_id.empty()) {
    static_cast<void>(Delete(client, created->cache_id(), absl::Seconds(2)));
  }
  return cache;
}

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Open(Client* client, const std::string& cache_id,
                                                       const KvOpenOptions& options) {
  auto service = Impl::ServiceOf(*client->impl_);
  auto info = service->Get(cache_id, options.deadline);
  if (!info.ok()) return info.status();
  info->set_cache_id(cache_id);
  // The server accepted the specification; its limits may exceed the defaults.
  absl::StatusOr<KvCacheSpec> spec = ParseKvCacheSpec(info->spec(), Limits());
  if (!spec.ok()) return spec.status();
  auto impl = std::make_unique<Impl>(std::move(service), client->impl_->workers,
                                     client->impl_->AttachCall(), client->impl_->cache_hold, *info,
                                     *std::move(spec), options);
  {
    absl::MutexLock lock(&impl->mutex);
    if (absl::Status status = impl->writer.Open(); !status.ok()) return status;
    impl->placement = impl->writer.placement();
    if (impl->hold != nullptr) impl->hold->Hold({cache_id});
  }
  return std::unique_ptr<KvCache>(new KvCache(std::move(impl)));
}

absl::StatusOr<std::vector<v1::KvCacheInfo>> KvCache::List(Client* client,
                                                           absl::Duration deadline) {
  const auto service = Impl::ServiceOf(*client->impl_);
  std::vector<v1::KvCacheInfo> caches;
  v1::ListCachesRequest request;
  do {
    auto page = service->List(request, deadline);
    if (!page.ok()) return page.status();
    for (v1::KvCacheInfo& cache : *page->mutable_caches()) caches.push_back(std::move(cache));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return caches;
}

absl::Status KvCache::Delete(Client* client, const std::string& cache_id, absl::Duration deadline) {
  return Impl::ServiceOf(*client->impl_)->Delete(cache_id, deadline);
}

const std::string& KvCache::id() const { return impl_->id; }
const v1::KvCacheSpec& KvCache::spec() const { return impl_->spec; }
const v1::KvPlacement& KvCache::placement() const { return impl_->placement; }
int64_t KvCache::bytes_per_worker() const { return impl_->bytes_per_worker; }

uint64_t KvCache::epoch() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.epoch();
}

v1::Transport KvCache::transport() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.transport();
}

std::string KvCache::transport_reason() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.transport_reason();
}

std::map<uint64_t, uint64_t> KvCache::sequences() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.sequences();
}

uint64_t KvCache::step() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.step();
}

uint64_t KvCache::blocks_free() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.blocks_free();
}

bool KvCache::leaving() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.leaving();
}

absl::Status KvCache::BeginStep(const v1::StepBegin& begin) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.BeginStep(begin);
}

absl::StatusOr<KvLayerReport> KvCache::CallLayer(const KvLayerArgs& args,
                                                 const KvLayerResults& results,
                                                 const KvCallOptions& options) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.CallLayer(args, results, options);
}

absl::Status KvCache::CommitStep(const KvCallOptions& options) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.CommitStep(options);
}

absl::Status KvCache::RunCommands(const std::vector<v1::KvCommand>& commands,
                                  const KvCallOptions& options) {
  v1::StepBegin begin;
  begin.mutable_commands()->Add(commands.begin(), commands.end());
  absl::MutexLock lock(&impl_->mutex);
  if (absl::Status status = impl_->writer.BeginStep(begin); !status.ok()) return status;
  return impl_->writer.CommitStep(options);
}

const v1::StepRefused& KvCache::refusal() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.refusal();
}

absl::Status KvCache::RoundTrip(const KvCallOptions& options) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->writer.RoundTrip(options);
}

void KvCache::Close() { impl_->Close(); }

absl::Status KvCache::Delete(absl::Duration deadline) {
  Close();
  return impl_->service->Delete(impl_->id, deadline);
}

}  // namespace ringattn::client
