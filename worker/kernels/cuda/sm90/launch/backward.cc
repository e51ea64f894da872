#include "worker/kernels/cuda/sm90/launch/backward.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/prepare_backward.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/sm90/backward/backward_kernels.h"
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_kernels.h"
#include "worker/kernels/cuda/sm90/launch/backward_deal.h"
#include "worker/kernels/cuda/sm90/launch/span_maps.h"
#include "worker/kernels/cuda/sm90/terms/terms_classes.h"
#include "worker/kernels/cuda/sm90/terms/terms_kernels.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

// An item occupies a multiprocessor, or all multiprocessors of a cluster, and runs for long. With
// this many items per slot the longest one of a causal call is a small fraction of the total. With
// fewer items, backward_deal.h decides.
constexpr int kItemsPerSlot = 3;

struct HeadDimClass {
  int64_t head_dim;
  BackwardKernel (*kernel)();
  BackwardKernel (*capped_kernel)();  // with a softcap
  // The kernel with a fixed order of sums. Null: the class has none.
  BackwardKernel (*ordered_kernel)();
  BackwardKernel (*ordered_capped_kernel)();
  // Blocks of a cluster that have the same keys and divide the columns. 1: blocks divide the keys.
  int32_t column_blocks = 1;

  bool Serves(const AttentionProblem& problem) const {
    return !problem.deterministic || ordered_kernel != nullptr;
  }
  // REQUIRES: Serves.
  BackwardKernel KernelOf(const AttentionProblem& problem) const {
    const bool capped = problem.softcap > 0;
    if (problem.deterministic) return capped ? ordered_capped_kernel() : ordered_kernel();
    return capped ? capped_kernel() : kernel();
  }
  std::vector<BackwardKernel> Kernels() const {
    std::vector<BackwardKernel> kernels = {kernel(), capped_kernel()};
    if (ordered_kernel != nullptr) {
      kernels.push_back(ordered_kernel());
      kernels.push_back(ordered_capped_kernel());
    }
    return kernels;
  }
};
#define RINGATTN_SM90_BACKWARD_CLASS(dim)                                                    \
  {                                                                                          \
    dim, BackwardKernel_d##dim, BackwardKernel_capped_d##dim, BackwardKernel_ordered_d##dim, \
        BackwardKernel_ordered_capped_d##dim                                                 \
  }
constexpr HeadDimClass kClasses[] = {
    RINGATTN_SM90_BACKWARD_CLASS(64),
    RINGATTN_SM90_BACKWARD_CLASS(96),
    RINGATTN_SM90_BACKWARD_CLASS(128),
    RINGATTN_SM90_BACKWARD_CLASS(192),
    RINGATTN_SM90_BACKWARD_CLASS(256),
    {512, BackwardKernel_d512, BackwardKernel_capped_d512, nullptr, nullptr, 2}};
#undef RINGATTN_SM90_BACKWARD_CLASS

// Returns null for head dims above the largest class.
const HeadDimClass* ClassOf(const AttentionProblem& problem) {
  const int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  for (const HeadDimClass& candidate : kClasses) {
    if (dim <= candidate.head_dim) return &candidate;
  }
  return nullptr;
}

// Indexed by TermKind.
constexpr BackwardKernel (*kTermKernels[][3])() = {
    {BackwardKernel_pairs_d64, BackwardKernel_drops_d64, BackwardKernel_terms_d64},
    {BackwardKernel_pairs_d128, BackwardKernel_drops_d128, BackwardKernel_terms_d128}};
// Dropout has no separate kernel here.
constexpr BackwardKernel (*kOrderedTermKernels[][3])() = {
    {BackwardKernel_ordered_pairs_d64, BackwardKernel_ordered_terms_d64,
     BackwardKernel_ordered_terms_d64},
    {BackwardKernel_ordered_pairs_d128, BackwardKernel_ordered_terms_d128,
     BackwardKernel_ordered_terms_d128}};

// Kernels that also store the gradient of the bias; the second one has a fixed order of sums.
constexpr BackwardKernel (*kStoringKernels[][2])() = {
    {BackwardKernel_stores_d64, BackwardKernel_ordered_stores_d64},
    {BackwardKernel_stores_d128, BackwardKernel_ordered_stores_d128}};

// REQUIRES: ServesTerms.
BackwardKernel TermKernelOf(const AttentionProblem& problem, bool stores = false) {
  const int wide = std::max(problem.head_dim, problem.head_dim_v) > 64;
  if (stores) return kStoringKernels[wide][problem.deterministic ? 1 : 0]();
  const auto& kernels = problem.deterministic ? kOrderedTermKernels : kTermKernels;
  return kernels[wide][static_cast<int>(TermKindOf(problem))]();
}

// Returns whether the kernel of a call can store dk and dv (StoredSums::kPossible).
bool KernelStores(const AttentionProblem& problem, bool stores_dbias) {
  if (problem.deterministic || problem.softcap > 0 || stores_dbias) return false;
  return !problem.terms.any() || TermKindOf(problem) != TermKind::kDrops;
}

// Returns whether every key has a tile, so that a kernel that stores writes every gradient. Keys
// that no query sees have no tile.
bool TilesHaveAllKeys(const BackwardCall& call, const BackwardPlan& plan, int32_t tile_keys) {
  int64_t tiles = 0;
  for (const KvBlock& block : call.blocks) {
    int64_t rows = 0;
    for (const Piece& piece : block.pieces) {
      rows += piece.length;
      tiles += (piece.length + tile_keys - 1) / tile_keys;
    }
    if (rows != block.rows) return false;
  }
  return tiles > 0 && tiles == static_cast<int64_t>(plan.tiles.size());
}

bool HaveStoredGradients(const std::vector<KvBlock>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(), [](const KvBlock& block) {
    return block.dk_out != nullptr && block.dv_out != nullptr && Aligned16(block.dk_out) &&
           Aligned16(block.dv_out);
  });
}

// Sets the addresses at which tiles store their gradients, or null if they add.
void PlaceKeyGradients(const std::vector<KvBlock>& blocks, bool stored, BackwardPlan& plan) {
  std::vector<const KvBlock*> of_piece;
  for (const KvBlock& block : blocks) {
    of_piece.insert(of_piece.end(), block.pieces.size(), &block);
  }
  for (BackwardTile& tile : plan.tiles) {
    const KvBlock& block = *of_piece[tile.piece];
    tile.dk = stored ? static_cast<float*>(block.dk_out) : nullptr;
    tile.dv = stored ? static_cast<float*>(block.dv_out) : nullptr;
  }
}

}  // namespace

bool ServesBackward(const AttentionProblem& problem, const DeviceInfo& device) {
  if (problem.terms.any()) {
    return ServesForward(problem, device) && ServesTerms(problem, /*backward=*/true) &&
           TermKernelOf(problem).shared_bytes <= device.shared_bytes_per_block;
  }
  const HeadDimClass* head_dim_class = ClassOf(problem);
  return head_dim_class != nullptr && head_dim_class->Serves(problem) &&
         ServesForward(problem, device) &&
         head_dim_class->KernelOf(problem).shared_bytes <= device.shared_bytes_per_block;
}

bool TakesBackward(const BackwardCall& call) {
  bool aligned = Aligned16(call.q) && Aligned16(call.dout) && Aligned16(call.dq_acc);
  for (const KvBlock& block : call.blocks) {
    aligned = aligned && Aligned16(block.k) && Aligned16(block.v) && Aligned16(block.dk) &&
              Aligned16(block.dv);
  }
  return aligned && OneStride(call.q_pieces, call.blocks) &&
         TakesBias(*call.problem, call.terms, call.blocks, StrideOf(call.q_pieces, call.blocks));
}

bool StoresBiasGradient(const BackwardCall& call, const void* dbias) {
  const AttentionProblem& problem = *call.problem;
  if (!problem.terms.bias.has_value()) return false;
  const BiasForm& form = *problem.terms.bias;
  const bool of_each_head =
      (form.per_head || problem.num_heads == 1) && (form.per_batch || problem.batch == 1);
  return of_each_head && !form.float32 && Aligned16(dbias) &&
         BiasInVectors(problem, call.blocks, StrideOf(call.q_pieces, call.blocks));
}

std::vector<KernelEntry> BackwardEntries() {
  std::vector<KernelEntry> entries;
  const auto add = [&entries](const BackwardKernel& kernel) {
    for (const void* address : {kernel.bf16, kernel.fp16}) {
      entries.push_back({address, kernel.shared_bytes});
    }
  };
  for (const HeadDimClass& candidate : kClasses) {
    for (const BackwardKernel& kernel : candidate.Kernels()) add(kernel);
  }
  for (const auto& of_class : kTermKernels) {
    for (const auto& kernel : of_class) add(kernel());
  }
  for (const auto& of_class : kStoringKernels) {
    for (const auto& kernel : of_class) add(kernel());
  }
  for (const auto& of_class : kOrderedTermKernels) {
    add(of_class[static_cast<int>(TermKind::kPairs)]());
    add(of_class[static_cast<int>(TermKind::kAll)]());
  }
  return entries;
}

absl::StatusOr<std::unique_ptr<PreparedBackward>> PreparedBackward::Create(
    const BackwardCall& call, const DeviceInfo& device, std::optional<void*> dbias) {
  std::unique_ptr<PreparedBackward> prepared(
      new PreparedBackward(call.problem->terms.any() ? kTermKernelClass : kPlainKernelClass));
  if (absl::Status status = prepared->Init(call, device, dbias); !status.ok()) return status;
  return prepared;
}

absl::Status PreparedBackward::Init(const BackwardCall& call, const DeviceInfo& device,
                                    std::optional<void*> dbias) {
  const AttentionProblem& problem = *call.problem;
  const HeadDimClass& head_dim_class = *ClassOf(problem);
  dtype_ = problem.dtype;
  const bool terms = problem.terms.any();
  kernel_ = terms ? TermKernelOf(problem, dbias.has_value()) : head_dim_class.KernelOf(problem);
  const bool ordered = problem.deterministic;
  const int32_t item_keys = kernel_.tile_keys() / head_dim_class.column_blocks;
  plan_ = PlanBackwardTiles(call, item_keys, ordered ? kernel_.tile_rows : 1);
  const int64_t tiles = static_cast<int64_t>(plan_.tiles.size());
  const int slots = std::max(device.sm_count / kernel_.blocks, 1);  // items that run at a time

  TermBackwardKernelParams& params = params_;
  params.common = CommonOf(problem, call.q_rows);
  params.lse = call.lse;
  params.delta = call.delta;
  params.dbias = dbias.value_or(nullptr);
  const int32_t group_size = params.common.group_size;
  params.heads_per_block = HeadsPerBlock(group_size, problem.num_heads, tiles * problem.batch,
                                         int64_t{kItemsPerSlot} * slots);
  const bool can_store = KernelStores(problem, dbias.has_value()) && problem.batch > 0 &&
                         HaveStoredGradients(call.blocks) &&
                         TilesHaveAllKeys(call, plan_, item_keys);
  // The model includes neither the waits of ordered blocks nor pairs of tiles that score terms
  // leave empty.
  if (!terms && !ordered && params.heads_per_block < group_size) {
    params.heads_per_block =
        BestHeads(WorkOf(call, plan_, kernel_, item_keys,
                         head_dim_class.head_dim / head_dim_class.column_blocks),
                  params.heads_per_block, can_store, slots);
  }
  stores_key_gradients_ = can_store && params.heads_per_block == group_size;
  PlaceKeyGradients(call.blocks, stores_key_gradients_, plan_);

  const int64_t packs = problem.num_heads / params.heads_per_block * problem.batch;
  if (tiles * packs > std::numeric_limits<int32_t>::max() / kernel_.blocks) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a backward call needs ", tiles * packs,
                     " work items (tiles times heads); the maximum is 2147483647 divided by the "
                     "thread blocks of a cluster"));
  }
  params.tile_count = static_cast<int32_t>(tiles);
  params.packs = static_cast<int32_t>(packs);
  params.section_packs = SectionPacks(tiles, packs, slots);

  if (ordered) {
    absl::Status s = turns_.Init(call, kernel_.tile_rows, params, plan_);
    if (!s.ok()) return s;
  }
  if (absl::Status s = MapQueries(call, kernel_.tile_rows, query_maps_); !s.ok()) return s;
  absl::Status status = MapKeys(problem, call.blocks, kernel_.block_keys, key_maps_);
  if (!status.ok()) return status;
  if (absl::Status s = MapSums(problem, call.blocks, sum_maps_); !s.ok()) return s;
  ranges_offset_ = TableBytes(plan_.tiles);
  query_maps_offset_ = ranges_offset_ + TableBytes(plan_.ranges);
  key_maps_offset_ = query_maps_offset_ + TableBytes(query_maps_);
  sum_maps_offset_ = key_maps_offset_ + TableBytes(key_maps_);
  turns_offset_ = sum_maps_offset_ + TableBytes(sum_maps_);
  terms_offset_ = turns_offset_ + turns_.table_bytes();
  if (terms) {
    status = terms_.Init(call, plan_, kernel_.tile_keys(), kernel_.tile_rows, problem.num_heads);
    if (!status.ok()) return status;
    params.stride = StrideOf(call.q_pieces, call.blocks);
    params.keys = PhiloxKeysOf(problem);
    status = bias_.Init(problem, call.terms, call.q_rows, call.blocks, params.stride);
    if (!status.ok()) return status;
  }
  table_bytes_ = terms_offset_ + terms_.table_bytes();
  bias_scratch_offset_ = terms_.scratch_bytes();
  turns_scratch_offset_ = bias_scratch_offset_ + bias_.scratch_bytes();
  sorted_scratch_offset_ = turns_scratch_offset_ + turns_.scratch_bytes();
  // Ordered blocks add in the plan's order.
  sorts_ = problem.terms.segment_ids && !ordered && tiles <= kMostSortedTiles;
  scratch_bytes_ = sorted_scratch_offset_ + (sorts_ ? TableBytes(plan_.tiles) : 0);
  return absl::OkStatus();
}

void PreparedBackward::WriteTables(void* target) const {
  WriteTable(plan_.tiles, target, 0);
  WriteTable(plan_.ranges, target, ranges_offset_);
  WriteTable(query_maps_, target, query_maps_offset_);
  WriteTable(key_maps_, target, key_maps_offset_);
  WriteTable(sum_maps_, target, sum_maps_offset_);
  turns_.WriteTables(static_cast<char*>(target) + turns_offset_);
  terms_.WriteTables(static_cast<char*>(target) + terms_offset_);
}

void PreparedBackward::DropTables() {
  plan_ = {};
  query_maps_ = {};
  key_maps_ = {};
  sum_maps_ = {};
  turns_.DropTables();
  terms_.DropTables();
}

absl::Status PreparedBackward::Launch(const TableLaunch& launch) const {
  const int64_t items = int64_t{params_.tile_count} * params_.packs;
  if (items == 0) return absl::OkStatus();
  TermBackwardKernelParams params = params_;
  params.common.stop_word = launch.stop_word;
  params.tiles = TableAt<BackwardTile>(launch.tables, 0);
  params.ranges = TableAt<QRange>(launch.tables, ranges_offset_);
  params.query_maps = TableAt<QueryMaps>(launch.tables, query_maps_offset_);
  params.key_maps = TableAt<SpanMaps>(launch.tables, key_maps_offset_);
  params.sum_maps = TableAt<SumMaps>(launch.tables, sum_maps_offset_);
  if (terms_.any()) {
    terms_.Place(TableAt<char>(launch.tables, terms_offset_), launch.scratch, params.terms,
                 params.pairs);
    absl::Status status = ToStatus(LaunchPairClasses(params, kernel_.tile_rows, launch.stream),
                                   "score term classes launch");
    if (!status.ok()) return status;
    status = bias_.Place(static_cast<char*>(launch.scratch) + bias_scratch_offset_,
                         BackwardBiasRows(kernel_.tile_rows, bias_.element_bytes()), launch.stream,
                         params.bias);
    if (!status.ok()) return status;
    if (sorts_) {
      auto* const sorted = reinterpret_cast<BackwardTile*>(static_cast<char*>(launch.scratch) +
                                                           sorted_scratch_offset_);
      status = ToStatus(LaunchSortedTiles(params, kernel_.tile_rows, sorted, launch.stream),
                        "sorted tiles launch");
      if (!status.ok()) return status;
      params.tiles = sorted;
    }
  }
  OrderedBackwardKernelParams ordered;
  OrderedTermBackwardKernelParams ordered_terms;
  void* arguments[] = {&params};
  if (turns_.any()) {
    absl::Status status = turns_.Place(TableAt<char>(launch.tables, turns_offset_),
                                       static_cast<char*>(launch.scratch) + turns_scratch_offset_,
                                       launch.stream, ordered.turns);
    if (!status.ok()) return status;
    static_cast<BackwardKernelParams&>(ordered) = params;
    static_cast<TermBackwardKernelParams&>(ordered_terms) = params;
    ordered_terms.turns = ordered.turns;
    arguments[0] = &ordered;
    if (terms_.any()) {
      arguments[0] = &ordered_terms;
      status = ToStatus(LaunchPairTurns(ordered_terms, launch.stream), "pair turns launch");
      if (!status.ok()) return status;
    }
  }
  const void* entry = dtype_ == DType::kFloat16 ? kernel_.fp16 : kernel_.bf16;
  const dim3 grid(static_cast<unsigned>(items * kernel_.blocks));
  return ToStatus(cudaLaunchKernel(entry, grid, dim3(kernel_.threads), arguments,
                                   kernel_.shared_bytes, launch.stream),
                  "attention kernel launch");
}

}  // namespace ringattn::worker::cuda::sm90
