// The links between the workers' hosts: which carry packets, and how fast.
#ifndef RINGATTN_TESTS_SIMULATION_NETWORK_H_
#define RINGATTN_TESTS_SIMULATION_NETWORK_H_

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/time/time.h"

namespace ringattn::server::simulation {

// Not thread safe.
struct Network {
  std::map<std::string, std::string> host_of;  // by worker
  // Packets from the first host to the second are lost. Links to the coordinator are separate.
  std::set<std::pair<std::string, std::string>> cuts;
  std::set<std::string> dark_hosts;  // without power
  // Longest additional delay between hosts.
  absl::Duration slowness;

  bool SameHost(const std::string& a, const std::string& b) const {
    return host_of.at(a) == host_of.at(b);
  }
  // Whether packets from one worker to another arrive.
  bool Carries(const std::string& from, const std::string& to) const {
    return cuts.count({host_of.at(from), host_of.at(to)}) == 0;
  }
  // Whether a connection from one worker to another can be made.
  bool Reaches(const std::string& from, const std::string& to) const {
    return Carries(from, to) && Carries(to, from) && dark_hosts.count(host_of.at(to)) == 0;
  }
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_NETWORK_H_
