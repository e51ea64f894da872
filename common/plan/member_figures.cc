#include "common/plan/member_figures.h"

#include <algorithm>
#include <map>

namespace ringattn {
namespace {

double Slower(double a, double b) {
  if (a == 0 || b == 0) return std::max(a, b);
  return std::min(a, b);
}

// Sets the device's and the link's figures to the slowest member's. A figure that no member has
// measured keeps its value.
template <typename Figures>
void SetSlowest(const std::vector<const MemberFigures*>& members, Figures* figures) {
  double flops = 0, link = 0, call_overhead = 0;
  for (const MemberFigures* member : members) {
    flops = Slower(flops, member->flops_per_second);
    link = Slower(link, member->link_bytes_per_second);
    call_overhead = std::max(call_overhead, member->call_overhead_seconds);
    figures->exchange_overhead_s =
        std::max(figures->exchange_overhead_s, member->exchange_overhead_seconds);
  }
  if (flops > 0) figures->device_flops_per_s = flops;
  if (link > 0) figures->link_bytes_per_s = link;
  if (call_overhead > 0) figures->step_overhead_s = call_overhead;
}

// Returns the members by host, the hosts in the order of their first members.
std::vector<std::vector<const MemberFigures*>> ByHost(const std::vector<MemberFigures>& members) {
  std::vector<std::vector<const MemberFigures*>> hosts;
  std::map<std::string, size_t> numbers;
  for (const MemberFigures& member : members) {
    const auto [found, is_new] = numbers.emplace(member.host, hosts.size());
    if (is_new) hosts.emplace_back();
    hosts[found->second].push_back(&member);
  }
  return hosts;
}

// Returns the host of each named member. Empty if all are on one host, or if a name is missing.
std::vector<int> HostsOfNamed(const std::vector<MemberFigures>& members,
                              const std::vector<std::string>& named) {
  std::vector<int> hosts;
  std::map<std::string, int> numbers;
  for (const std::string& name : named) {
    const auto found = std::find_if(members.begin(), members.end(),
                                    [&](const MemberFigures& m) { return m.name == name; });
    if (found == members.end()) return {};
    const int next = static_cast<int>(numbers.size());
    hosts.push_back(numbers.emplace(found->host, next).first->second);
  }
  if (numbers.size() <= 1) hosts.clear();
  return hosts;
}

}  // namespace

PlannerInputs InputsOfMembers(const std::vector<MemberFigures>& members,
                              const std::vector<std::string>& named, double default_host_link) {
  PlannerInputs inputs;
  inputs.host_of_member = HostsOfNamed(members, named);
  inputs.ready_workers = static_cast<int>(members.size());
  std::vector<const MemberFigures*> all;
  double host_link = 0, host_total = 0, host_exchange_overhead = 0;
  for (const MemberFigures& member : members) {
    all.push_back(&member);
    host_link = Slower(host_link, member.host_link_bytes_per_second);
    host_total = Slower(host_total, member.host_total_bytes_per_second);
    host_exchange_overhead =
        std::max(host_exchange_overhead, member.host_exchange_overhead_seconds);
  }
  SetSlowest(all, &inputs);
  const auto hosts = ByHost(members);
  if (hosts.size() <= 1) return inputs;
  inputs.host_link_measured = host_link > 0;
  inputs.host_link_bytes_per_s = host_link > 0 ? host_link : default_host_link;
  inputs.host_total_bytes_per_s = host_total;
  if (host_link > 0) inputs.host_exchange_overhead_s = host_exchange_overhead;
  for (const auto& host : hosts) {
    // A figure that a host's members have not measured is taken from the others.
    HostFigures figures{static_cast<int>(host.size()), inputs.device_flops_per_s,
                        inputs.link_bytes_per_s, inputs.step_overhead_s, 0};
    SetSlowest(host, &figures);
    inputs.hosts.push_back(figures);
  }
  return inputs;
}

}  // namespace ringattn
