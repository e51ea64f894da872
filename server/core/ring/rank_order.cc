#include "server/core/ring/rank_order.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace ringattn::server {
namespace {

const std::string& DomainOf(const v1::WorkerLocation& location) {
  return location.accelerator_domain().empty() ? location.host() : location.accelerator_domain();
}

uint64_t SlotOf(const v1::WorkerLocation& location) {
  return location.has_slot() ? location.slot() : std::numeric_limits<uint64_t>::max();
}

}  // namespace

void SortForRanks(const Roster& roster, std::vector<ConnectionId>* workers) {
  std::map<std::string, std::pair<std::string, std::string>> hosts;  // zone and domain
  for (ConnectionId worker : *workers) {
    const v1::WorkerLocation& location = roster.at(worker).registration.location();
    const std::pair own(location.zone(), DomainOf(location));
    const auto [host, is_new] = hosts.emplace(location.host(), own);
    if (is_new) continue;
    host->second.first = std::min(host->second.first, own.first);
    host->second.second = std::min(host->second.second, own.second);
  }
  const auto key = [&](ConnectionId worker) {
    const v1::Register& registration = roster.at(worker).registration;
    const v1::WorkerLocation& location = registration.location();
    return std::tie(hosts.at(location.host()), location.host(), DomainOf(location));
  };
  std::sort(workers->begin(), workers->end(), [&](ConnectionId a, ConnectionId b) {
    const auto key_a = key(a), key_b = key(b);
    if (key_a != key_b) return key_a < key_b;
    const uint64_t slot_a = SlotOf(roster.at(a).registration.location());
    const uint64_t slot_b = SlotOf(roster.at(b).registration.location());
    if (slot_a != slot_b) return slot_a < slot_b;
    return roster.NameOf(a) < roster.NameOf(b);
  });
}

std::vector<int> HostsOf(const std::vector<ConnectionId>& members, const Roster& roster) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (ConnectionId member : members) {
    const std::string& host = roster.at(member).registration.location().host();
    hosts.push_back(numbers.emplace(host, static_cast<int>(numbers.size())).first->second);
  }
  return hosts;
}

}  // namespace ringattn::server
