#include "worker/kernels/cuda/sm90/launch/backward_deal.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace ringattn::worker::cuda::sm90 {
namespace {

// Rates of an H100 or H200 per microsecond. They only weigh a block's products against its bytes
// and its start; all compared choices have the same products.
constexpr double kOperationsPerSm = 4.2e6;  // the same for all head dims within a fifth
constexpr double kBytes = 3.75e6;           // all multiprocessors together
constexpr double kBlockStart = 3.0;         // until its first product
// The fraction of the time that more heads than usual must save: long blocks leave fewer blocks to
// compensate for effects outside the model.
constexpr double kDoubt = 0.01;
// Bytes of q, dout and dq in a section, for blocks of unequal length.
constexpr double kSectionBytes = 80e6;

// Zeroing, and a conversion that reads 4 bytes and writes 2.
constexpr double kSumBytes = 4 + 4 + 2;

bool OutgrowsCache(const BackwardWork& work, int32_t heads_per_block, int slots) {
  const auto [shortest, longest] =
      std::minmax_element(work.query_tiles.begin(), work.query_tiles.end());
  if (work.query_tiles.empty() || *shortest == *longest) return false;
  const int64_t packs = work.num_heads / heads_per_block * work.batch;
  const int64_t section = SectionPacks(static_cast<int64_t>(work.query_tiles.size()), packs, slots);
  return static_cast<double>(section * heads_per_block * work.head_bytes) > kSectionBytes;
}

}  // namespace

BackwardWork WorkOf(const BackwardCall& call, const BackwardPlan& plan,
                    const BackwardKernel& kernel, int32_t item_keys, int64_t block_dim) {
  const AttentionProblem& problem = *call.problem;
  const int64_t columns = problem.head_dim + problem.head_dim_v;
  BackwardWork work;
  work.num_heads = problem.num_heads;
  work.group_size = static_cast<int32_t>(problem.num_heads / problem.num_kv_heads);
  work.batch = problem.batch;
  // S, dP, dV, dQ and dK of a block.
  work.tile_operations = int64_t{10} * kernel.tile_rows * kernel.block_keys * block_dim;
  work.tile_sums = item_keys * columns;
  work.head_bytes = call.q_rows * (columns * ElementBytes(problem.dtype) + problem.head_dim * 4);
  for (const KvBlock& block : call.blocks) {
    work.sums += problem.batch * block.rows * problem.num_kv_heads * columns;
  }
  work.query_tiles.reserve(plan.tiles.size());
  for (const BackwardTile& tile : plan.tiles) {
    int32_t count = 0;
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      count += (plan.ranges[i].row_count + kernel.tile_rows - 1) / kernel.tile_rows;
    }
    work.query_tiles.push_back(count);
  }
  return work;
}

int32_t SectionPacks(int64_t tiles, int64_t packs, int slots) {
  if (tiles == 0 || packs == 0) return 1;
  const int64_t wanted = std::max<int64_t>((slots + tiles / 2) / tiles, 1);
  const int64_t sections = (packs + wanted - 1) / wanted;
  return static_cast<int32_t>((packs + sections - 1) / sections);
}

double BlocksTime(const BackwardWork& work, int32_t heads_per_block, bool stores, int slots) {
  const int64_t packs = work.num_heads / heads_per_block * work.batch;
  const int32_t section_packs =
      SectionPacks(static_cast<int64_t>(work.query_tiles.size()), packs, slots);
  const double tile_time = heads_per_block * (work.tile_operations / kOperationsPerSm);
  const double block_time = kBlockStart + work.tile_sums * (stores ? 2 : 4) * slots / kBytes;
  // The times at which each slot ends the blocks that it has taken.
  std::priority_queue<double, std::vector<double>, std::greater<double>> ends(
      std::greater<double>(), std::vector<double>(slots, 0.0));
  double last = 0;
  for (int64_t first = 0; first < packs; first += section_packs) {
    const int64_t count = std::min<int64_t>(section_packs, packs - first);
    for (const int32_t tiles : work.query_tiles) {
      for (int64_t i = 0; i < count; ++i) {
        const double end = ends.top() + tiles * tile_time + block_time;
        ends.pop();
        ends.push(end);
        last = std::max(last, end);
      }
    }
  }
  return last;
}

int32_t BestHeads(const BackwardWork& work, int32_t usual, bool can_store, int slots) {
  const auto time_of = [&](int32_t heads) {
    const bool stores = can_store && heads == work.group_size;
    const double added = can_store && !stores ? work.sums * kSumBytes / kBytes : 0;
    return BlocksTime(work, heads, stores, slots) + added;
  };
  int32_t best = usual;
  double best_time = time_of(usual) / (1 + kDoubt);
  for (int32_t heads = work.group_size; heads > usual; --heads) {
    if (work.group_size % heads != 0 || OutgrowsCache(work, heads, slots)) continue;
    const double time = time_of(heads);
    if (time >= best_time) continue;
    best = heads;
    best_time = time;
  }
  return best;
}

}  // namespace ringattn::worker::cuda::sm90
