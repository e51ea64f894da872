// KvRoute: which rows of each K/V shard every rank holds at every step of a ring pass, and which
// rank sends them. It describes row ranges only; the schedule turns them into buffers, transfers
// and calls.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_KV_ROUTE_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_KV_ROUTE_H_

#include <cstdint>
#include <numeric>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/band.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/route/cancel_latch.h"
#include "common/schedule/route/ring_visits.h"
#include "common/schedule/route/work_count.h"

namespace ringattn {

// How a shard is divided before exchange.
enum class PartRule : uint8_t {
  // Separates the two slices of a zigzag shard, so that only needed rows travel and not those
  // between them. Ranges that touch are joined again.
  kSlices,
  // Up to kMaxParts parts of about equal length, each a separate range: the gradients of one part
  // travel while another part computes.
  kPipeline,
};

// Four, because often only one slice of a zigzag shard has work: with two parts per slice, one
// travels while the other computes.
inline constexpr int64_t kMaxParts = 4;
// Shorter parts would cost more in calls than they hide in transfers.
inline constexpr int64_t kMinPartRows = 256;

// The rows of a block at its holder at a step. Most blocks of a route are equal, so a route stores
// each value once.
struct HeldBlock {
  // Disjoint, ascending ranges of the source's rows. At step 0 the whole shard as one range.
  // kPipeline, step > 0: exactly `parts` entries, possibly empty; otherwise non-empty.
  std::vector<RowRange> ranges;
  // Sets of parts, as bits: those of which the holder sees a key, and those to whose gradients an
  // earlier rank of the visits' chain has contributed (kPipeline, relay).
  uint32_t sees = 0;
  uint32_t travels = 0;
};

struct KvRoute {
  int world_size = 1;
  int group_size = 1;  // of visits; world_size in a flat ring
  // False: relay. Ranks pass on the rows that a later rank of the visits' order needs.
  // True: direct. Every rank receives only the rows it needs, from their owner. Groups are then of
  // no use, so there is one.
  bool direct = false;
  std::vector<int64_t> q_rows;   // by rank
  std::vector<int64_t> kv_rows;  // by rank
  PartRule rule = PartRule::kSlices;
  // Parts per shard; 1 under kSlices, where a visit moves a block at once.
  int parts = 1;
  // Step k is visit k. Visits without transfers are left out.
  std::vector<RingVisit> visits;
  // By step: the last part that some holder sees, which the backward pass computes first; else 0.
  std::vector<int> first_parts;
  std::vector<int> chain_begins;   // by round: its first visit with an inner hop, or kNone
  std::vector<HeldBlock> blocks;   // all different
  std::vector<int32_t> block_ids;  // indices of `blocks`, by step, then source: BlockId

  int steps() const { return static_cast<int>(visits.size()); }
  std::vector<int> AllVisits() const {
    std::vector<int> all(visits.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  int SourceOf(int rank, int step) const { return Shifted(rank, step, -1); }
  int HolderOf(int source, int step) const { return Shifted(source, step, 1); }
  // Return the rank that sends `source`'s rows to their holder at `step` > 0, and the step at which
  // the sender holds them.
  int SenderTo(int source, int step) const { return HolderOf(source, SenderStep(step)); }
  int SenderStep(int step) const { return direct ? 0 : visits[step].sender; }
  int BlockId(int step, int source) const {
    return block_ids[static_cast<size_t>(step) * world_size + source];
  }
  const HeldBlock& Block(int step, int source) const { return blocks[BlockId(step, source)]; }
  // Returns what `source`'s holder has at the step (HeldBlock::ranges).
  const std::vector<RowRange>& Held(int step, int source) const {
    return Block(step, source).ranges;
  }
  // Return whether source's holder at the step has work with the part, or with any part.
  bool Sees(int step, int source, int part) const {
    return (Block(step, source).sees >> part & 1) != 0;
  }
  bool SeesAny(int step, int source) const { return Block(step, source).sees != 0; }
  // Returns whether a rank that holds the part before the step, in the chain of the step's visit,
  // has contributed to its gradients.
  bool Travels(int step, int source, int part) const {
    return (Block(step, source).travels >> part & 1) != 0;
  }

 private:
  // Returns the rank at the step's distance, to the right or, with sign -1, to the left.
  int Shifted(int rank, int step, int sign) const {
    if (group_size == world_size) {
      const int shifted = rank + sign * visits[step].inner;
      return shifted < 0             ? shifted + world_size
             : shifted >= world_size ? shifted - world_size
                                     : shifted;
    }
    const int groups = world_size / group_size;
    const int group = (rank / group_size + groups + sign * visits[step].outer) % groups;
    return group * group_size +
           (rank % group_size + group_size + sign * visits[step].inner) % group_size;
  }
};

// The pieces of every rank's shards, computed once per problem. Not thread safe.
class RingSpans {
 public:
  // `latch` must outlive the pieces. It is polled before each pass over two ranks' pieces.
  RingSpans(const AttentionSpec& spec, const ShardPlan& plan, CancelLatch* latch);

  // Returns the pieces of rows of `source`'s kv shard.
  std::vector<Piece> KeysOf(int source, const RowRange& kv_rows) const;
  // Returns the work of `rank`'s q shard with rows of `source`'s kv shard, or with given keys.
  WorkCount Work(int rank, int source, const RowRange& kv_rows) const {
    return Work(rank, KeysOf(source, kv_rows));
  }
  WorkCount Work(int rank, const std::vector<Piece>& keys) const;
  // Stores by rank the hull of the keys that the rank sees among rows `part` of `source`, as rows
  // of source's shard.
  void FindNeeds(int source, const RowRange& part, std::vector<RowRange>& by_rank) const;

 private:
  CancelLatch* const latch_;
  std::vector<Band> bands_;
  std::vector<std::vector<Piece>> q_;   // by rank
  std::vector<std::vector<Piece>> kv_;  // by rank
};

// REQUIRES: group_size divides plan.world_size.
KvRoute MakeKvRoute(const ShardPlan& plan, const RingSpans& pieces, PartRule rule, int group_size);

// Returns by rank, then source, the rows of source's kv shard that the rank sees, as disjoint,
// ascending, non-empty ranges. The two slices of a zigzag shard are separate unless they touch.
std::vector<std::vector<std::vector<RowRange>>> SeenRows(const ShardPlan& plan,
                                                         const RingSpans& pieces);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_KV_ROUTE_H_
