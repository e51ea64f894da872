#include "server/core/requests/regions.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/durations.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {
namespace {

// Time after a token's expiry until the last RegionChanged for it has arrived.
constexpr absl::Duration kOfferEnds = absl::Seconds(5);

// Returns the field of a location by its index in the choice. Locations of several writers are in
// the order of the writers.
std::string LocationField(const TransportChoice& choice, size_t index, const char* field) {
  if (choice.writers.empty()) return absl::StrCat("transport.places[", index, "].", field);
  const int writer = choice.places[index].writer;
  size_t first = index;
  while (first > 0 && choice.places[first - 1].writer == writer) --first;
  return absl::StrCat("transport.places[", index - first, "].", field, " of writer ", writer);
}

const char* NameOf(v1::RegionKind kind) {
  return kind == v1::REGION_KIND_CUDA ? "CUDA memory" : "host memory";
}

bool Takes(const v1::Register& registration, v1::RegionKind kind) {
  return !registration.local_socket().empty() &&
         (kind != v1::REGION_KIND_CUDA || registration.takes_cuda_memory());
}

}  // namespace

void Regions::OnAttach(const AttachRequested& event) {
  AttachCompleted completed;
  completed.call = event.call;
  std::variant<v1::AttachResponse, Failure> result = Attach(event);
  if (auto* failure = std::get_if<Failure>(&result)) {
    completed.failure = *std::move(failure);
  } else {
    completed.response = std::get<v1::AttachResponse>(std::move(result));
  }
  batch_.Emit(std::move(completed));
}

std::variant<Regions::Region*, Failure> Regions::FindOrMake(const AttachRequested& event) {
  const Limits& limits = config_.limits;
  if (event.bytes < 1 || event.bytes > limits.max_request_bytes) {
    return RegionSizeWrong(event.bytes, limits.max_request_bytes);
  }
  const auto found = regions_.find(event.region_id);
  if (!event.is_new) {
    if (found == regions_.end() || found->second.principal != event.principal) {
      return RegionNotFound();
    }
    if (found->second.bytes != event.bytes) return RegionHasAnotherSize(found->second.bytes);
    if (found->second.kind != event.kind) {
      return RegionHasAnotherKind(found->second.kind == v1::REGION_KIND_CUDA);
    }
    return &found->second;
  }
  const int64_t own = std::count_if(regions_.begin(), regions_.end(), [&](const auto& entry) {
    return entry.second.client == event.client;
  });
  const bool full = static_cast<int64_t>(regions_.size()) >= limits.max_regions;
  if (own >= limits.max_regions_per_client || (full && !EvictUnattached())) {
    return TooManyRegions(own, limits.max_regions_per_client, config_.retry_after);
  }
  Region& region = regions_[event.region_id];
  region.principal = event.principal;
  region.client = event.client;
  region.bytes = event.bytes;
  region.kind = event.kind;
  return &region;
}

bool Regions::EvictUnattached() {
  std::map<std::string, int64_t> unattached;  // by client
  for (const auto& [id, region] : regions_) {
    if (region.attached.empty()) ++unattached[region.client];
  }
  auto oldest = regions_.end();
  const auto most = [&](const Region& region) { return unattached.at(region.client); };
  for (auto entry = regions_.begin(); entry != regions_.end(); ++entry) {
    const Region& region = entry->second;
    if (!region.attached.empty()) continue;
    if (oldest == regions_.end() || most(region) > most(oldest->second) ||
        (most(region) == most(oldest->second) && region.offered_at < oldest->second.offered_at)) {
      oldest = entry;
    }
  }
  if (oldest == regions_.end()) return false;
  for (const auto& [connection, worker] : roster_.workers()) {
    if (!Takes(worker.registration, oldest->second.kind)) continue;
    batch_.Send(connection)->mutable_forget_region()->set_region_id(oldest->first);
  }
  regions_.erase(oldest);
  return true;
}

std::variant<v1::AttachResponse, Failure> Regions::Attach(const AttachRequested& event) {
  // Workers that are away come back, so the client may retry.
  if (roster_.empty()) return NoRing(config_.retry_after);
  const bool served = std::any_of(
      roster_.workers().begin(), roster_.workers().end(),
      [&event](const auto& entry) { return Takes(entry.second.registration, event.kind); });
  if (!served) return NoLocalMemory(event.kind == v1::REGION_KIND_CUDA);
  std::variant<Region*, Failure> found = FindOrMake(event);
  if (auto* failure = std::get_if<Failure>(&found)) return *std::move(failure);
  Region& region = *std::get<Region*>(found);
  region.offered_at = batch_.now();
  v1::AttachResponse response;
  response.set_region_id(event.region_id);
  SetDuration(config_.limits.attach_token_time, response.mutable_valid_for());
  size_t next_token = 0;
  for (const auto& [connection, worker] : roster_.workers()) {
    const v1::Register& registration = worker.registration;
    if (region.attached.count(connection) > 0) {
      response.add_attached(registration.name());
      continue;
    }
    const bool takes = Takes(registration, event.kind);
    if (!takes || next_token == event.tokens.size()) {
      response.add_unavailable(absl::StrCat(
          registration.name(), ": ",
          takes ? "is one worker too many" : absl::StrCat("takes no ", NameOf(event.kind))));
      continue;
    }
    const std::string& token = event.tokens[next_token++];
    v1::ExpectRegion* expect = batch_.Send(connection)->mutable_expect_region();
    expect->set_region_id(event.region_id);
    expect->set_token(token);
    expect->set_principal(event.principal);
    expect->set_bytes(event.bytes);
    expect->set_kind(event.kind);
    SetDuration(config_.limits.attach_token_time, expect->mutable_valid_for());
    v1::AttachPoint* point = response.add_points();
    point->set_worker(registration.name());
    point->set_socket_path(registration.local_socket());
    point->set_token(token);
    point->set_host_id(registration.host_id());
  }
  return response;
}

void Regions::OnChanged(ConnectionId connection, const v1::RegionChanged& changed) {
  const auto found = regions_.find(changed.region_id());
  if (found == regions_.end()) {
    // The region was removed meanwhile, and nothing could use it.
    if (changed.attached()) {
      batch_.Send(connection)->mutable_forget_region()->set_region_id(changed.region_id());
    }
    return;
  }
  if (changed.attached()) {
    found->second.attached.insert(connection);
  } else {
    // The client closed the region's socket. The region ends with its last attachment; a later
    // Attach of it fails with NOT_FOUND, and the client creates a new one.
    found->second.attached.erase(connection);
    if (found->second.attached.empty()) regions_.erase(found);
  }
}

void Regions::OnWorkerLost(ConnectionId connection) {
  for (auto& [id, region] : regions_) region.attached.erase(connection);
}

void Regions::Sweep() {
  const absl::Time old = batch_.now() - config_.limits.attach_token_time - kOfferEnds;
  for (auto entry = regions_.begin(); entry != regions_.end();) {
    const bool unused = entry->second.attached.empty() && entry->second.offered_at < old;
    entry = unused ? regions_.erase(entry) : std::next(entry);
  }
}

void Regions::Forgive(absl::Duration pause) {
  for (auto& [id, region] : regions_) region.offered_at += pause;
}

const Regions::Region* Regions::Find(const std::string& id, const std::string& principal) const {
  const auto found = regions_.find(id);
  if (found == regions_.end() || found->second.principal != principal) return nullptr;
  return &found->second;
}

std::optional<Failure> Regions::CheckLocations(const TransportChoice& choice,
                                               const std::string& principal) const {
  for (size_t i = 0; i < choice.places.size(); ++i) {
    const TensorLocationChoice& location = choice.places[i];
    const Region* region = Find(location.region_id, principal);
    if (region == nullptr) return RegionUnknown(LocationField(choice, i, "region_id"));
    if (location.offset > region->bytes - location.bytes) {
      return LocationOutsideRegion(LocationField(choice, i, "offset"), TensorName(location.tensor),
                                   location.offset, location.bytes, region->bytes);
    }
  }
  return std::nullopt;
}

std::string Regions::CheckAttached(const TransportChoice& choice,
                                   const std::vector<ConnectionId>& members,
                                   v1::RegionKind kind) const {
  for (const TensorLocationChoice& location : choice.places) {
    const auto region = regions_.find(location.region_id);
    if (region == regions_.end() || region->second.kind == kind) continue;
    return absl::StrCat(TensorName(location.tensor), " lies in ", NameOf(region->second.kind));
  }
  for (ConnectionId member : members) {
    if (!Takes(roster_.at(member).registration, kind)) {
      return absl::StrCat(roster_.NameOf(member), " takes no ", NameOf(kind));
    }
    for (const TensorLocationChoice& location : choice.places) {
      const auto region = regions_.find(location.region_id);
      if (region != regions_.end() && region->second.attached.count(member) > 0) continue;
      return absl::StrCat(roster_.NameOf(member), " has not attached the region of ",
                          TensorName(location.tensor));
    }
  }
  return "";
}

std::string Regions::CheckStepRings(const std::string& region_id, const std::string& principal,
                                    const std::vector<ConnectionId>& members) const {
  const Region* region = Find(region_id, principal);
  for (ConnectionId member : members) {
    if (!Takes(roster_.at(member).registration, v1::REGION_KIND_HOST)) {
      return absl::StrCat(roster_.NameOf(member), " takes no ", NameOf(v1::REGION_KIND_HOST));
    }
    if (region == nullptr || region->attached.count(member) == 0) {
      return absl::StrCat(roster_.NameOf(member), " has not attached the region of the step rings");
    }
  }
  if (region->kind != v1::REGION_KIND_HOST) {
    return absl::StrCat("the region of the step rings is ", NameOf(region->kind));
  }
  return "";
}

namespace {

// Returns the reason that clients cannot stream to the members; empty if they can.
std::string CheckDirect(const TransportChoice& choice, const Roster& roster,
                        const TransportRoute& route) {
  if (!choice.why_not_direct.empty()) return choice.why_not_direct;
  for (ConnectionId member : route.members) {
    if (roster.at(member).registration.client_data_address().empty()) {
      return absl::StrCat(roster.NameOf(member), " has no client data address");
    }
  }
  if (route.spans > route.max_ticket_spans) {
    return absl::StrCat("the layout cuts the tensors into ", route.spans, " spans, more than ",
                        route.max_ticket_spans);
  }
  return "";
}

}  // namespace

std::variant<TransportDecision, Failure> DecideTransport(const TransportChoice& choice,
                                                         const Regions& regions,
                                                         const Roster& roster,
                                                         const TransportRoute& route) {
  if (choice.says_nothing()) {
    if (choice.writers.empty()) return TransportDecision();
    return TransportUnavailable("the writers accept no transport in common");
  }
  std::string why_not;
  const auto add = [&](const char* transport, const std::string& why) {
    absl::StrAppend(&why_not, why_not.empty() ? "" : "; ", "no ", transport, ": ", why);
  };
  for (TransportKind kind : choice.accept) {
    switch (kind) {
      case TransportKind::kCoordinatorStream:
        return TransportDecision{v1::TRANSPORT_RELAY,
                                 why_not.empty() ? "relay: the request prefers it" : why_not};
      case TransportKind::kDirectStream: {
        const std::string why = CheckDirect(choice, roster, route);
        if (why.empty()) {
          return TransportDecision{v1::TRANSPORT_DIRECT,
                                   "direct stream: all members have a client data address"};
        }
        add("direct stream", why);
        break;
      }
      case TransportKind::kHostMemory:
      case TransportKind::kCudaMemory: {
        const bool cuda = kind == TransportKind::kCudaMemory;
        const v1::RegionKind memory = cuda ? v1::REGION_KIND_CUDA : v1::REGION_KIND_HOST;
        const std::string why = choice.why_not_places.empty()
                                    ? regions.CheckAttached(choice, route.members, memory)
                                    : choice.why_not_places;
        if (why.empty()) {
          return TransportDecision{
              cuda ? v1::TRANSPORT_CUDA_MEMORY : v1::TRANSPORT_HOST_MEMORY,
              absl::StrCat(NameOf(memory), ": all members have the regions of all tensors")};
        }
        add(NameOf(memory), why);
        break;
      }
    }
  }
  if (choice.required) return TransportUnavailable(why_not);
  return TransportDecision{v1::TRANSPORT_RELAY, why_not};
}

}  // namespace ringattn::server
