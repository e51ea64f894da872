// Coordinator: K/V caches, from CreateCache to their end.
#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/plan/kernel_rate.h"
#include "server/core/coordinator_impl.h"
#include "server/core/kv/kv_failures.h"
#include "server/core/kv/kv_members.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {

// ------------------------------------------------------------------- creating

void Coordinator::Impl::On(const KvCacheRequested& event) {
  if (kv_caches_.AnswerRepeated(event)) return;
  if (draining()) return kv_caches_.Refuse(event.call, Draining(config_.retry_after));
  const std::vector<KvSite> sites = KvSites(*event.spec);
  if (sites.empty()) {
    return kv_caches_.Refuse(event.call, KvWorkersMissing(1, 0, config_.retry_after));
  }
  KvMembersRequest request;
  request.world_size = event.world_size;
  request.members = event.members;
  request.divide_blocks = event.divide_blocks;
  request.max_world_size = config_.limits.max_world_size;
  request.retry_after = config_.retry_after;
  std::variant<KvReservation, Failure> chosen = ChooseKvMembers(*event.spec, request, sites);
  if (auto* failure = std::get_if<Failure>(&chosen)) {
    return kv_caches_.Refuse(event.call, *std::move(failure));
  }
  const auto& reservation = std::get<KvReservation>(chosen);
  const int64_t bytes =
      reservation.bytes_per_worker * static_cast<int64_t>(reservation.members.size());
  if (std::optional<Failure> failure = kv_caches_.CheckLimits(event, bytes)) {
    return kv_caches_.Refuse(event.call, *std::move(failure));
  }
  for (const auto& [connection, name] : reservation.members) {
    EvictForCache(connection, reservation.bytes_per_worker);
  }
  kv_caches_.Reserve(event, reservation);
}

// The workers that serve caches, in the ring or not. A cache belongs to no generation.
std::vector<KvSite> Coordinator::Impl::KvSites(const KvCacheSpec& spec) const {
  AttentionSpec kernels;  // what chooses the kernels of the cache's first layers
  kernels.dtype = spec.dtype;
  kernels.shape.head_dim = spec.groups[0].head_dim;
  kernels.shape.head_dim_v = spec.groups[0].head_dim_v;
  std::map<ConnectionId, int64_t> residual_bytes;
  for (const std::string& handle : residuals_.EvictionOrder(operations_.ResidualsInUse())) {
    for (const ResidualMember& member : residuals_.Find(handle)->members) {
      residual_bytes[member.connection] += member.bytes;
    }
  }
  std::map<ConnectionId, int64_t> reserved = ReservedByWorker();
  std::vector<KvSite> sites;
  for (const auto& [connection, worker] : roster_.workers()) {
    const v1::Register& registration = worker.registration;
    if (worker.leaving || registration.max_kv_cache_bytes() == 0) continue;
    KvSite& site = sites.emplace_back();
    site.connection = connection;
    site.worker = registration.name();
    site.memory_bytes = static_cast<int64_t>(registration.memory_bytes());
    site.max_kv_cache_bytes = static_cast<int64_t>(registration.max_kv_cache_bytes());
    site.kv_cache_bytes = kv_caches_.BytesOn(connection);
    site.residual_bytes = residual_bytes[connection];
    site.request_bytes = reserved[connection] - site.kv_cache_bytes - site.residual_bytes;
    const KernelRate* rate = RateOf(worker.kernel_rates, kernels, Direction::kForward);
    if (rate != nullptr) site.rates.flops_per_second = rate->flops_per_second;
    site.rates.memory_bytes_per_second = absl::StartsWith(registration.device(), "cuda")
                                             ? kGpuMemoryBytesPerSecond
                                             : kCpuMemoryBytesPerSecond;
  }
  return sites;
}

// Residuals give way to caches, because a residual only saves work.
void Coordinator::Impl::EvictForCache(ConnectionId connection, int64_t bytes) {
  const auto memory = static_cast<int64_t>(roster_.at(connection).registration.memory_bytes());
  if (memory == 0) return;  // unknown; the worker decides
  while (ReservedByWorker()[connection] > memory - bytes) {
    if (!EvictOneOn(connection, "")) return;
  }
}

// -------------------------------------------------------------------- opening

void Coordinator::Impl::On(const KvWriterRequested& event) {
  if (draining()) return kv_caches_.RefuseOpen(event.call, Draining(config_.retry_after));
  auto found = kv_caches_.FindToOpen(event.id, event.principal);
  if (auto* failure = std::get_if<Failure>(&found)) {
    return kv_caches_.RefuseOpen(event.call, *std::move(failure));
  }
  const KvCacheRecord& record = *std::get<const KvCacheRecord*>(found);
  for (const KvCacheMember& member : record.members) {
    if (!roster_.at(member.connection).leaving) continue;
    kv_caches_.Lose(event.id, absl::StrCat("worker ", member.worker, " leaves"));
    auto ended = kv_caches_.FindToOpen(event.id, event.principal);
    return kv_caches_.RefuseOpen(event.call, std::get<Failure>(std::move(ended)));
  }
  std::variant<KvTransport, Failure> transport = ChooseKvTransport(event, record);
  if (auto* failure = std::get_if<Failure>(&transport)) {
    return kv_caches_.RefuseOpen(event.call, *std::move(failure));
  }
  kv_caches_.Open(event, std::get<KvTransport>(transport));
}

std::variant<KvTransport, Failure> Coordinator::Impl::ChooseKvTransport(
    const KvWriterRequested& event, const KvCacheRecord& record) const {
  KvTransport transport;
  if (!event.accepts_host_memory && !event.accepts_direct) {
    transport.reason = "relay: the caller prefers it";
    return transport;
  }
  std::vector<ConnectionId> members;
  for (const KvCacheMember& member : record.members) {
    members.push_back(member.connection);
    const std::string& address = roster_.at(member.connection).registration.client_data_address();
    if (address.empty()) {
      // The stream that a step ring belongs to is a direct stream.
      transport.reason =
          absl::StrCat("no ", event.accepts_host_memory ? "host memory and no " : "",
                       "direct stream: worker ", member.worker, " has no client data address");
      if (!event.accepts_relay) return KvTransportUnavailable(transport.reason);
      transport.endpoints.clear();
      return transport;
    }
    transport.endpoints.push_back(address);
  }
  if (event.accepts_host_memory) {
    const std::string why = regions_.CheckStepRings(event.region_id, event.principal, members);
    if (why.empty()) {
      transport.transport = v1::TRANSPORT_HOST_MEMORY;
      transport.reason = "host memory: all members have the region of the step rings";
      transport.region_id = event.region_id;
      return transport;
    }
    transport.reason = absl::StrCat("no host memory: ", why);
    if (!event.accepts_direct && !event.accepts_relay) {
      return KvTransportUnavailable(transport.reason);
    }
    if (!event.accepts_direct) {
      transport.endpoints.clear();
      return transport;
    }
    absl::StrAppend(&transport.reason, "; ");
  }
  transport.transport = v1::TRANSPORT_DIRECT;
  absl::StrAppend(&transport.reason, "direct stream: all members have a client data address");
  return transport;
}

void Coordinator::Impl::On(const KvCachesRenewed& event) {
  for (const std::string& id : event.ids) kv_caches_.Renew(id, event.principal, event.ttl);
}

void Coordinator::Impl::On(const KvCacheDeleted& event) {
  kv_caches_.Delete(event.id, event.principal);
}

void Coordinator::Impl::On(const KvCacheFailed& event) {
  kv_caches_.Fail(event.id, event.epoch, event.end);
}

// ---------------------------------------------------------------------- views

KvCacheView Coordinator::Impl::FindKvCache(const std::string& id,
                                           const std::string& principal) const {
  return kv_caches_.Find(id, principal);
}

std::vector<v1::KvCacheInfo> Coordinator::Impl::ListKvCaches(const std::string& principal,
                                                             const std::string& client,
                                                             const std::string& after,
                                                             int count) const {
  return kv_caches_.List(principal, client, after, count);
}

KvWriterView Coordinator::Impl::FindKvWriter(const std::string& id, const std::string& principal,
                                             uint64_t epoch, const std::string& token) const {
  KvWriterView view = kv_caches_.FindWriter(id, principal, epoch, token);
  if (view.failure) return view;
  const KvCacheRecord& record = *kv_caches_.Get(id);
  for (size_t rank = 0; rank < view.shards.size(); ++rank) {
    view.shards[rank].data_address =
        roster_.at(record.members[rank].connection).registration.data_address();
  }
  return view;
}

}  // namespace ringattn::server
