#include "common/plan/host_rings.h"

#include <algorithm>
#include <functional>
#include <set>

namespace ringattn {
namespace {

bool ComputesMore(const HostFigures& a, const HostFigures& b) {
  return a.workers * a.device_flops_per_s > b.workers * b.device_flops_per_s;
}

bool HasMoreWorkers(const HostFigures& a, const HostFigures& b) { return a.workers > b.workers; }

bool HasSlowHost(const std::vector<HostFigures>& hosts) {
  const auto differ = [&hosts](double HostFigures::*rate) {
    const auto [slowest, fastest] = std::minmax_element(
        hosts.begin(), hosts.end(),
        [rate](const HostFigures& a, const HostFigures& b) { return a.*rate < b.*rate; });
    return (*slowest).*rate < kSlowHostRatio * (*fastest).*rate;
  };
  return differ(&HostFigures::device_flops_per_s) || differ(&HostFigures::link_bytes_per_s);
}

// Returns the inputs of a ring of the first `count` hosts, with the figures of all.
PlannerInputs InputsOfFirst(const PlannerInputs& inputs, std::vector<HostFigures> hosts,
                            size_t count) {
  hosts.resize(count);
  PlannerInputs part = inputs;
  part.ready_workers = 0;
  for (const HostFigures& host : hosts) part.ready_workers += host.workers;
  part.hosts = std::move(hosts);
  return part;
}

// Replaces the figures by those of the inputs' own hosts.
PlannerInputs WithOwnFigures(PlannerInputs part) {
  const HostFigures& first = part.hosts.front();
  part.device_flops_per_s = first.device_flops_per_s;
  part.link_bytes_per_s = first.link_bytes_per_s;
  part.step_overhead_s = first.step_overhead_s;
  part.exchange_overhead_s = first.exchange_overhead_s;
  for (const HostFigures& host : part.hosts) {
    part.device_flops_per_s = std::min(part.device_flops_per_s, host.device_flops_per_s);
    part.link_bytes_per_s = std::min(part.link_bytes_per_s, host.link_bytes_per_s);
    part.step_overhead_s = std::max(part.step_overhead_s, host.step_overhead_s);
    part.exchange_overhead_s = std::max(part.exchange_overhead_s, host.exchange_overhead_s);
  }
  return part;
}

}  // namespace

std::vector<HostRing> RingsOfWholeHosts(const PlannerInputs& inputs, bool deterministic,
                                        int min_workers) {
  if (inputs.hosts.empty()) return {};
  std::vector<HostFigures> hosts = inputs.hosts;
  const bool differ = !deterministic && HasSlowHost(hosts);
  std::stable_sort(hosts.begin(), hosts.end(), differ ? ComputesMore : HasMoreWorkers);
  std::vector<HostRing> rings;
  for (size_t count = 1; count <= hosts.size();
       count = count == hosts.size() ? count + 1 : std::min(2 * count, hosts.size())) {
    PlannerInputs part = InputsOfFirst(inputs, hosts, count);
    if (part.ready_workers < min_workers && count < hosts.size()) continue;
    const int workers = part.ready_workers;
    if (differ) part = WithOwnFigures(std::move(part));
    rings.push_back({static_cast<int>(count), workers, std::move(part), differ});
  }
  return rings;
}

std::vector<int> HostOfEachRank(const PlannerInputs& inputs, int world_size) {
  if (!inputs.host_of_member.empty()) return inputs.host_of_member;
  std::vector<int> sizes;
  for (const HostFigures& host : inputs.hosts) sizes.push_back(host.workers);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  if (sizes.empty() || sizes.front() >= world_size) return {};
  std::vector<int> hosts;
  for (size_t host = 0; host < sizes.size(); ++host) {
    hosts.insert(hosts.end(), sizes[host], static_cast<int>(host));
  }
  hosts.resize(world_size);
  return hosts;
}

int64_t RanksPerHost(const std::vector<int>& host_of_rank, int world_size) {
  if (host_of_rank.empty()) return world_size;
  const auto run_from = [&](size_t begin) {
    size_t end = begin;
    while (end < host_of_rank.size() && host_of_rank[end] == host_of_rank[begin]) ++end;
    return end - begin;
  };
  const size_t size = run_from(0);
  std::set<int> hosts;
  for (size_t begin = 0; begin < host_of_rank.size(); begin += size) {
    if (run_from(begin) != size || !hosts.insert(host_of_rank[begin]).second) return 0;
  }
  return static_cast<int64_t>(size);
}

}  // namespace ringattn
