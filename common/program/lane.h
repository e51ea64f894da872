// Lane: the two classes of links between the ranks of a ring. A transfer between hosts may take
// several times as long as one inside a host, so each class has a separate order.
#ifndef RINGATTN_COMMON_PROGRAM_LANE_H_
#define RINGATTN_COMMON_PROGRAM_LANE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringattn {

enum class Lane : uint8_t {
  kInside = 0,   // the ranks are on one host
  kBetween = 1,  // the ranks are on different hosts
};
inline constexpr Lane kAllLanes[] = {Lane::kInside, Lane::kBetween};
inline constexpr size_t kLanes = 2;

inline size_t IndexOf(Lane lane) { return static_cast<size_t>(lane); }

// Returns the lane of transfers between two ranks.
//   host_of_rank  ranks with the same number are on one host; empty: all ranks are
inline Lane LaneBetween(const std::vector<int>& host_of_rank, int a, int b) {
  return host_of_rank.empty() || host_of_rank[a] == host_of_rank[b] ? Lane::kInside
                                                                    : Lane::kBetween;
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROGRAM_LANE_H_
