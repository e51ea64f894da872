// RingVisits: the order in which a rank computes on the blocks of others, when each block travels,
// and from whom it comes. It knows no rows and no buffers.
//
// Ranks form groups of equal size, in practice one per host: rank = group * group_size + slot. The
// block of source (group g, slot s) visits rank (g + o, s + i), both modulo their number, once per
// outer distance o and inner distance i. Visit 0 is the rank's own block, (0, 0).
//
// - Inner hop, i > 0: the left neighbour in the group, which has the block at (o, i - 1), passes it
//   on.
// - Outer hop, o > 0 and i = 0: the rank with the same slot in the group before, which has it at
//   (o - 1, 0), passes the block on. The hop may take as long as a round of group_size visits,
//   because the block is not needed before the next round.
//
// With one group this is the flat ring: visit i computes on the block at distance i to the left.
//
// Gradients. In round o the gradients of a block are summed along the inner hops o, 1 ... o, G - 1.
// They arrive at their collector, which adds its own contribution and sends the sum to the owner:
// one outer hop per round, to the same slot. The collector of round o > 0 is the rank that holds
// the block at (o, 0); in round 0 it is the owner.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_RING_VISITS_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_RING_VISITS_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace ringattn {

struct RingVisit {
  int outer = 0;  // distance between the groups
  int inner = 0;  // distance between the slots
  // The visit of the rank that sends the block.
  int sender = 0;
  // The block travels during the computation of visits [fetch_begin, fetch_end]: one visit for an
  // inner hop. The sender has it before fetch_begin, and no rank uses it before fetch_end has
  // ended.
  int fetch_begin = 0;
  int fetch_end = 0;
  // Gradients: the next visit of the chain along inner hops, or kNone for its last visit and for
  // collectors of outer rounds; and the collector's visit, which is 0 in round 0.
  int chain_next = kNone;
  int collector = 0;
  // Collectors of outer rounds: the visit during which the owner has received the sum, which is the
  // next collector's. The number of visits in the last round: while owners compute on their blocks.
  int sum_arrives = 0;

  static constexpr int kNone = -1;
  bool is_outer_hop() const { return outer > 0 && inner == 0; }
};

enum class VisitOrder : uint8_t {
  // Round by round, each from inner distance 0 on. For a forward pass.
  kByRound,
  // Every collector computes after the chain that ends at it, and the owner last of all. Round 0 is
  // divided: its first visits hide the first outer hop of keys, and its last visits hide the last
  // outer hop of gradients, which has twice the bytes of 16-bit keys. For a backward pass.
  kCollectorsLast,
};

// Returns the visits in their order, without those for which `is_used` returns false.
// REQUIRES: with several groups, if (o, i) is used, so is the visit from which its block comes.
std::vector<RingVisit> OrderVisits(int groups, int group_size, VisitOrder order,
                                   const std::function<bool(int outer, int inner)>& is_used);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_RING_VISITS_H_
