#include "worker/kernels/cuda/sm90/launch/forward.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/sm90/forward/forward_kernels.h"
#include "worker/kernels/cuda/sm90/forward/keyless_rows.h"
#include "worker/kernels/cuda/sm90/forward/late_pieces.h"
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_kernels.h"
#include "worker/kernels/cuda/sm90/launch/float8_forward.h"
#include "worker/kernels/cuda/sm90/launch/span_maps.h"
#include "worker/kernels/cuda/sm90/launch/tensor_maps.h"
#include "worker/kernels/cuda/sm90/launch/work_shifts.h"
#include "worker/kernels/cuda/sm90/terms/terms_classes.h"
#include "worker/kernels/cuda/sm90/terms/terms_kernels.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

// Bytes of K and V that the tiles running at one time should share: about half of an H200's L2.
constexpr int64_t kSectionBytes = int64_t{32} << 20;
// If a section of uneven tiles has fewer waves than this, all heads form one section.
constexpr int64_t kUnevenWaves = 12;

// Approximate rate of one multiprocessor with these kernels (H200: 650e12 on 132). Score terms
// divide it by up to kTermFactor.
constexpr double kFlopsPerSecond = 5e12;
constexpr double kTermFactor = 3;

// `long_kernel`, if not null, serves calls whose q tiles see many keys. `split_kernel` serves calls
// with split keys if no tile has more rows than this kernel's tiles. `blocks`: thread blocks that
// divide the rows of a tile; if more than one, each cluster of them computes one item.
struct HeadDimClass {
  int64_t head_dim;
  int64_t head_dim_v;
  ForwardKernel (*kernel)();
  ForwardKernel (*long_kernel)() = nullptr;
  ForwardKernel (*split_kernel)() = nullptr;
  int32_t blocks = 1;
};
constexpr HeadDimClass kClasses[] = {
    {64, 64, ForwardKernel_d64},
    {96, 96, ForwardKernel_d96},
    {128, 128, ForwardKernel_d128, ForwardKernel_d128_long, ForwardKernel_d128_split},
    {192, 192, ForwardKernel_d192},
    {256, 256, ForwardKernel_d256},
    {512, 512, ForwardKernel_d512, nullptr, nullptr, 2},
    {576, 512, ForwardKernel_d576, nullptr, nullptr, 2}};
// Keys per q tile, on average: at 32K and 64K the long kernel of d128 is 1 to 4% faster, at
// 8K and 16K up to 2% slower (H200, 2026-11-22).
constexpr int64_t kLongKeys = 24576;

// Returns null if no kernel is wide enough.
const HeadDimClass* ClassOf(const AttentionProblem& problem) {
  for (const HeadDimClass& candidate : kClasses) {
    if (problem.head_dim <= candidate.head_dim && problem.head_dim_v <= candidate.head_dim_v) {
      return &candidate;
    }
  }
  return nullptr;
}

// Indexed by TermKind.
constexpr ForwardKernel (*kTermKernels[][3])() = {
    {ForwardKernel_pairs_d64, ForwardKernel_drops_d64, ForwardKernel_terms_d64},
    {ForwardKernel_pairs_d128, ForwardKernel_drops_d128, ForwardKernel_terms_d128}};

constexpr ForwardKernel (*kAlibiKernels[])() = {ForwardKernel_alibi_d64, ForwardKernel_alibi_d128};

// REQUIRES: ServesTerms.
ForwardKernel TermKernelOf(const AttentionProblem& problem) {
  const int wide = std::max(problem.head_dim, problem.head_dim_v) > 64;
  if (AlibiInProduct(problem)) return kAlibiKernels[wide]();
  return kTermKernels[wide][static_cast<int>(TermKindOf(problem))]();
}

int64_t KeysOf(const ForwardPlan& plan, const ForwardTile& tile) {
  int64_t keys = 0;
  for (int32_t r = tile.range_begin; r < tile.range_end; ++r) keys += plan.ranges[r].row_count;
  return keys;
}

// Returns the keys of all tiles together.
int64_t TotalKeys(const ForwardPlan& plan) {
  int64_t keys = 0;
  for (const ForwardTile& tile : plan.tiles) keys += KeysOf(plan, tile);
  return keys;
}

int64_t MeanKeys(const ForwardPlan& plan) {
  return TotalKeys(plan) / static_cast<int64_t>(plan.tiles.size());
}

// Returns the approximate time of a plan on one multiprocessor. `rows`: of a tile in all heads.
double SecondsOf(const AttentionProblem& problem, const ForwardPlan& plan, int64_t rows) {
  const double pairs = static_cast<double>(TotalKeys(plan)) * static_cast<double>(rows);
  const double flops = 2.0 * pairs * static_cast<double>(problem.head_dim + problem.head_dim_v);
  return flops / kFlopsPerSecond * (problem.terms.any() ? kTermFactor : 1);
}

// Brings the pieces of ranges into the form of late_pieces.h.
void MarkLatePieces(const std::vector<KvBlock>& blocks, ForwardPlan& plan) {
  std::vector<int32_t> late;  // by piece
  for (const KvBlock& block : blocks) late.resize(late.size() + block.pieces.size(), block.late);
  for (KvRange& range : plan.ranges) range.piece = LatePiece(range.piece, late[range.piece]);
}

// Returns ForwardTileShape::early_key_tiles: the key tiles that all multiprocessors compute until
// each arrival of late keys. Returns none if heads are divided into sections. Split tiles then have
// splits in all sections, but the keys arrive during the first one. A tile of so many keys also
// spends about that time on keys that are not late.
std::vector<int64_t> EarlyKeyTiles(const ForwardCall& call, const ForwardPlan& plan,
                                   const ForwardTileShape& shape, int32_t tile_rows,
                                   int32_t sm_count) {
  const AttentionProblem& problem = *call.problem;
  const int64_t tiles = static_cast<int64_t>(plan.tiles.size());
  const int64_t pack = tile_rows / shape.q_rows;
  const int64_t packs = problem.num_heads / problem.num_kv_heads / pack;
  const int32_t section = SectionHeads(call, plan, tiles, packs, shape.blocks_per_tile, sm_count,
                                       /*element_bytes=*/2);
  if (section < shape.blocks_per_tile) return {};
  const double flops = 2.0 * tile_rows * shape.keys * (problem.head_dim + problem.head_dim_v);
  std::vector<int64_t> early;
  for (const absl::Duration after : call.late_after) {
    const double key_tiles = absl::ToDoubleSeconds(after) * kFlopsPerSecond / flops;
    early.push_back(
        static_cast<int64_t>(key_tiles * sm_count / static_cast<double>(shape.blocks_per_tile)));
  }
  return early;
}

bool FewToMerge(const ForwardPlan& plan, int32_t pack) {
  return std::all_of(plan.combines.begin(), plan.combines.end(), [&](const CombineTile& combine) {
    return combine.q_rows * pack <= kMostMergedRows &&
           combine.slot_end - combine.slot_begin <= kMostMergedParts;
  });
}

int64_t MostRows(const ForwardPlan& plan) {
  int64_t rows = 0;
  for (const ForwardTile& tile : plan.tiles) rows = std::max<int64_t>(rows, tile.q_rows);
  return rows;
}

}  // namespace

int32_t SectionHeads(const ForwardCall& call, const ForwardPlan& plan, int64_t tiles,
                     int64_t packs_per_kv_head, int64_t heads, int64_t sm_count,
                     int64_t element_bytes) {
  const AttentionProblem& problem = *call.problem;
  int64_t bytes = 0;  // of one kv head
  for (const KvBlock& block : call.blocks) {
    bytes += block.rows * (problem.head_dim + problem.head_dim_v) * element_bytes;
  }
  const int64_t kv_heads = std::max<int64_t>(kSectionBytes / std::max<int64_t>(bytes, 1), 1);
  const int64_t largest = std::min(kv_heads * packs_per_kv_head, heads);
  const int64_t sections = (heads + largest - 1) / std::max<int64_t>(largest, 1);
  // Uneven tiles (causal) balance if the longest tiles of all heads start first. Blocks that
  // process keys of similar length in step share them in the cache without sections. Sections are
  // useful only if they are many waves long.
  int64_t total = 0, longest = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t keys = KeysOf(plan, plan.tiles[i]);
    total += keys;
    longest = std::max(longest, keys);
  }
  const int64_t section_heads = (heads + sections - 1) / std::max<int64_t>(sections, 1);
  const bool uneven = longest * tiles * 4 > total * 5;
  if (uneven && section_heads * tiles < kUnevenWaves * sm_count) return static_cast<int32_t>(heads);
  return static_cast<int32_t>(std::max<int64_t>(section_heads, 1));
}

std::vector<SplitPart> SplitPartsOf(const ForwardPlan& plan, size_t tiles) {
  std::vector<SplitPart> parts(tiles);
  for (size_t t = 0; t < tiles; ++t) {
    parts[t].tile = plan.tiles[t];
    const KvRange& last = plan.ranges[plan.tiles[t].range_end - 1];
    parts[t].last = {static_cast<int32_t>(last.row_begin),
                     last.row_count,
                     last.full_begin,
                     last.full_end,
                     last.limits.first_lower,
                     last.limits.first_upper,
                     last.piece};
    const int32_t slot = plan.tiles[t].partial_slot;
    const auto after = std::upper_bound(
        plan.combines.begin(), plan.combines.end(), slot,
        [](int32_t at, const CombineTile& combine) { return at < combine.slot_begin; });
    if (slot >= 0) parts[t].combine = static_cast<int32_t>(after - plan.combines.begin()) - 1;
  }
  return parts;
}

bool ServesForward(const AttentionProblem& problem, const DeviceInfo& device) {
  if (problem.compute == ComputeDType::kFloat8E4M3) return ServesFloat8Forward(problem, device);
  if (problem.dtype == DType::kFloat32 || device.compute_major != 9) return false;
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return false;
  if (std::max(problem.head_dim, problem.head_dim_v) <= 32) return false;
  if (problem.terms.any()) {
    return ServesTerms(problem, /*backward=*/false) &&
           TermKernelOf(problem).shared_bytes <= device.shared_bytes_per_block;
  }
  const HeadDimClass* head_dim_class = ClassOf(problem);
  return head_dim_class != nullptr &&
         head_dim_class->kernel().shared_bytes <= device.shared_bytes_per_block;
}

bool TakesForward(const ForwardCall& call) {
  bool aligned = Aligned16(call.q) && Aligned16(call.out) && Aligned16(call.out_acc);
  for (const KvBlock& block : call.blocks) {
    aligned = aligned && Aligned16(block.k) && Aligned16(block.v);
  }
  return aligned && OneStride(call.q_pieces, call.blocks) &&
         TakesBias(*call.problem, call.terms, call.blocks, StrideOf(call.q_pieces, call.blocks));
}

bool TakesLateKeys(const ForwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  return !problem.terms.any() && problem.compute == ComputeDType::kAsInputs &&
         ClassOf(problem)->blocks == 1;
}

std::vector<KernelEntry> ForwardEntries() {
  std::vector<KernelEntry> entries;
  for (int element_bytes : {2, 4}) entries.push_back({BiasCopyEntry(element_bytes), 0});
  for (const void* address : KeylessRowsEntries()) entries.push_back({address, 0});
  for (const void* address : PairClassEntries()) entries.push_back({address, 0});
  const auto add = [&entries](const ForwardKernel& kernel) {
    for (const void* address : {kernel.bf16, kernel.fp16}) {
      entries.push_back({address, kernel.shared_bytes});
    }
  };
  for (const HeadDimClass& candidate : kClasses) {
    add(candidate.kernel());
    if (candidate.long_kernel != nullptr) add(candidate.long_kernel());
    if (candidate.split_kernel != nullptr) add(candidate.split_kernel());
  }
  for (const auto& of_class : kTermKernels) {
    for (const auto& kernel : of_class) add(kernel());
  }
  for (const auto& kernel : kAlibiKernels) add(kernel());
  return entries;
}

absl::StatusOr<std::unique_ptr<PreparedForward>> PreparedForward::Create(
    const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning) {
  std::unique_ptr<PreparedForward> prepared(
      new PreparedForward(call.problem->terms.any() ? kTermKernelClass : kPlainKernelClass));
  if (absl::Status status = prepared->Init(call, device, tuning); !status.ok()) return status;
  return prepared;
}

absl::Status PreparedForward::Init(const ForwardCall& call, const DeviceInfo& device,
                                   const KernelTuning& tuning) {
  Division division = Choose(call, device, tuning);
  Plan(call, device, tuning, division);
  if (absl::Status s = Divide(call, device, tuning, division); !s.ok()) return s;
  if (absl::Status s = MapTensors(call, division); !s.ok()) return s;
  return LayOut(call, division);
}

PreparedForward::Division PreparedForward::Choose(const ForwardCall& call, const DeviceInfo& device,
                                                  const KernelTuning& tuning) {
  const AttentionProblem& problem = *call.problem;
  dtype_ = problem.dtype;
  const HeadDimClass& head_dim_class = *ClassOf(problem);
  const bool terms = problem.terms.any();
  kernel_ = terms ? TermKernelOf(problem) : head_dim_class.kernel();
  Division division;
  division.blocks = terms ? 1 : head_dim_class.blocks;
  division.items_at_once = std::max(device.sm_count / division.blocks, 1);

  ForwardParams& forward = params_.forward;
  forward.common = CommonOf(problem, call.q_rows);
  forward.q = call.q;
  forward.lse = call.lse;
  forward.sinks = call.sinks;
  SetResult(call, forward);

  // The rows of a bias belong to one head.
  division.pack = forward.head_pack =
      problem.terms.bias.has_value() ? 1 : HeadPack(call, kernel_.tile_rows / division.blocks);
  ForwardTileShape& shape = division.shape;
  shape.q_rows = kernel_.tile_rows / division.blocks / division.pack * division.blocks;
  shape.keys = kernel_.tile_keys;
  shape.blocks_per_tile = problem.batch * (problem.num_heads / division.pack);
  shape.target_blocks = tuning.max_key_splits == 1 ? 0 : division.items_at_once;
  shape.blocks_at_once = shape.target_blocks;
  // For wider heads the partial results cost as much as splitting saves (H200, 16K: d192 runs at
  // 721 TFLOP/s split and 736 unsplit).
  shape.fills_last_wave = !terms && head_dim_class.head_dim <= 128;
  if (problem.terms.bias.has_value()) shape.key_align = kBiasKeyAlign;
  return division;
}

// The first plan shows whether the keys are split and how many each tile has. That decides between
// the kernels of a class. Their tiles differ, so another kernel needs another plan.
void PreparedForward::Plan(const ForwardCall& call, const DeviceInfo& device,
                           const KernelTuning& tuning, Division& division) {
  const AttentionProblem& problem = *call.problem;
  const HeadDimClass& head_dim_class = *ClassOf(problem);
  const bool terms = problem.terms.any();
  ForwardTileShape& shape = division.shape;
  plan_ = PlanForwardTiles(call, shape);
  if (!terms && head_dim_class.split_kernel != nullptr && !plan_.combines.empty()) {
    const ForwardKernel candidate = head_dim_class.split_kernel();
    for_parts_ = candidate.shared_bytes <= device.shared_bytes_per_block &&
                 MostRows(plan_) * division.pack <= candidate.tile_rows;
    if (for_parts_) {
      kernel_ = candidate;
      shape.q_rows = kernel_.tile_rows / division.pack;
      shape.keys = kernel_.tile_keys;
      plan_ = PlanForwardTiles(call, shape);
    }
  }
  if (!terms && !for_parts_ && head_dim_class.long_kernel != nullptr && !plan_.tiles.empty()) {
    const ForwardKernel candidate = head_dim_class.long_kernel();
    const int64_t threshold = tuning.long_keys > 0 ? tuning.long_keys : kLongKeys;
    if (candidate.shared_bytes <= device.shared_bytes_per_block && MeanKeys(plan_) >= threshold) {
      kernel_ = candidate;
      shape.keys = kernel_.tile_keys;
      plan_ = PlanForwardTiles(call, shape);
    }
  }
  if (call.has_late_keys() && !terms && division.blocks == 1 && !plan_.tiles.empty()) {
    first_late_piece_ = kFirstLatePiece;
    shape.early_key_tiles = EarlyKeyTiles(call, plan_, shape, kernel_.tile_rows, device.sm_count);
    plan_ = PlanForwardTiles(call, shape);
    MarkLatePieces(call.blocks, plan_);
  }
}

absl::Status PreparedForward::Divide(const ForwardCall& call, const DeviceInfo& device,
                                     const KernelTuning& tuning, const Division& division) {
  const AttentionProblem& problem = *call.problem;
  const ForwardTileShape& shape = division.shape;
  // Tiles without keys come last.
  size_t tiles = plan_.tiles.size();
  while (tiles > 0 && plan_.tiles[tiles - 1].range_begin == plan_.tiles[tiles - 1].range_end) {
    --tiles;
  }
  keyless_tiles_ = static_cast<int32_t>(plan_.tiles.size() - tiles);
  const int64_t items = static_cast<int64_t>(tiles) * shape.blocks_per_tile;
  const int64_t most_items = std::numeric_limits<int32_t>::max() / division.blocks;
  if (items > most_items) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a forward call needs ", items,
                     " work items (tiles times heads); the maximum is ", most_items));
  }
  params_.forward.tile_rows = kernel_.tile_rows;
  params_.tiles = static_cast<int32_t>(tiles);
  params_.heads = static_cast<int32_t>(shape.blocks_per_tile);
  params_.section_heads =
      for_parts_ ? params_.heads
                 : SectionHeads(call, plan_, params_.tiles,
                                params_.forward.common.group_size / division.pack,
                                shape.blocks_per_tile, division.items_at_once, /*element_bytes=*/2);
  const ShiftedLaunch shifted = DivideIntoShifts(
      items, device.sm_count,
      SecondsOf(problem, plan_, kernel_.tile_rows * shape.blocks_per_tile) / device.sm_count,
      for_parts_ ? -1 : tuning.shift_cycles);
  params_.shifts = shifted.shifts;
  // Clusters are not persistent.
  blocks_ = division.blocks > 1 ? static_cast<int32_t>(items * division.blocks) : shifted.blocks;
  return absl::OkStatus();
}

absl::Status PreparedForward::MapTensors(const ForwardCall& call, const Division& division) {
  const AttentionProblem& problem = *call.problem;
  MappedTensor q;
  q.data = call.q;
  q.columns = problem.head_dim;
  q.heads = problem.num_heads;
  q.rows = q.row_pitch = call.q_rows;
  q.batch = problem.batch;
  q.box_heads = division.pack;
  q.box_rows = division.shape.q_rows / division.blocks;
  params_.q_box_bytes = static_cast<uint32_t>(q.box_rows) * division.pack * 128;
  if (absl::Status s = EncodeMap(problem.dtype, q, params_.q_map); !s.ok()) return s;
  return MapKeys(problem, call.blocks, kernel_.tile_keys, maps_);
}

absl::Status PreparedForward::LayOut(const ForwardCall& call, const Division& division) {
  const AttentionProblem& problem = *call.problem;
  const bool terms = problem.terms.any();
  if (for_parts_) {
    merges_ = FewToMerge(plan_, division.pack);
    parts_ = SplitPartsOf(plan_, params_.tiles);
    std::copy_n(maps_.begin(), std::min<size_t>(maps_.size(), kNearMaps), near_maps_.begin());
  }
  const int64_t tickets = merges_ ? static_cast<int64_t>(plan_.combines.size()) * params_.heads : 0;
  tickets_offset_ = AlignUp(sizeof(WorkCounters));
  tiles_offset_ = tickets_offset_ + AlignUp(tickets * static_cast<int64_t>(sizeof(uint32_t)));
  ranges_offset_ = tiles_offset_ + TableBytes(plan_.tiles);
  combines_offset_ = ranges_offset_ + TableBytes(plan_.ranges);
  maps_offset_ = combines_offset_ + TableBytes(plan_.combines);
  parts_offset_ = maps_offset_ + TableBytes(maps_);
  terms_offset_ = parts_offset_ + TableBytes(parts_);
  split_ = SplitKeys(plan_, params_.forward);
  if (terms) {
    absl::Status s = terms_.Init(call, plan_, kernel_.tile_rows, kernel_.tile_keys,
                                 problem.num_heads / division.pack);
    if (!s.ok()) return s;
    params_.stride = StrideOf(call.q_pieces, call.blocks);
    params_.keys = PhiloxKeysOf(problem);
    s = bias_.Init(problem, call.terms, call.q_rows, call.blocks, params_.stride);
    if (!s.ok()) return s;
  }
  table_bytes_ = terms_offset_ + terms_.table_bytes();
  scratch_bytes_ = split_.scratch_bytes();
  if (terms) {
    terms_scratch_offset_ = AlignUp(scratch_bytes_);
    bias_scratch_offset_ = terms_scratch_offset_ + terms_.scratch_bytes();
    scratch_bytes_ = bias_scratch_offset_ + bias_.scratch_bytes();
  }
  return absl::OkStatus();
}

void PreparedForward::WriteTables(void* target) const {
  std::memset(target, 0, tiles_offset_);
  WriteTable(plan_.tiles, target, tiles_offset_);
  WriteTable(plan_.ranges, target, ranges_offset_);
  WriteTable(plan_.combines, target, combines_offset_);
  WriteTable(maps_, target, maps_offset_);
  WriteTable(parts_, target, parts_offset_);
  terms_.WriteTables(static_cast<char*>(target) + terms_offset_);
}

std::optional<int64_t> PreparedForward::keys_word_offset() const {
  if (first_late_piece_ == kNoLatePiece || params_.tiles == 0 || !has_work()) return std::nullopt;
  return offsetof(WorkCounters, keys);
}

absl::Status PreparedForward::Launch(const TableLaunch& launch) const {
  if (!has_work()) return absl::OkStatus();
  TermForwardKernelParams params = params_;
  if (launch.awaits_keys) params.first_late_piece = first_late_piece_;
  ForwardParams& forward = params.forward;
  forward.common.stop_word = launch.stop_word;
  forward.tiles = TableAt<ForwardTile>(launch.tables, tiles_offset_);
  forward.ranges = TableAt<KvRange>(launch.tables, ranges_offset_);
  split_.Place(launch.scratch, forward);
  params.maps = TableAt<SpanMaps>(launch.tables, maps_offset_);
  params.counters = const_cast<WorkCounters*>(TableAt<WorkCounters>(launch.tables, 0));

  if (keyless_tiles_ > 0) {
    const absl::Status status =
        ToStatus(LaunchKeylessRows(dtype_, forward, forward.tiles + params.tiles, keyless_tiles_,
                                   launch.stream),
                 "keyless rows launch");
    if (!status.ok() || params.tiles == 0) return status;
  }
  if (terms_.any()) {
    char* const scratch = static_cast<char*>(launch.scratch);
    terms_.Place(TableAt<char>(launch.tables, terms_offset_), scratch + terms_scratch_offset_,
                 params.terms, params.pairs);
    absl::Status status = ToStatus(LaunchPairClasses(params, kernel_.tile_keys, launch.stream),
                                   "score term classes launch");
    if (!status.ok()) return status;
    status =
        bias_.Place(scratch + bias_scratch_offset_, kForwardBiasRows, launch.stream, params.bias);
    if (!status.ok()) return status;
  }
  const void* entry = dtype_ == DType::kFloat16 ? kernel_.fp16 : kernel_.bf16;
  void* arguments[] = {&params};
  SplitForwardParams split;
  if (for_parts_) {
    static_cast<ForwardKernelParams&>(split) = params;
    std::copy(near_maps_.begin(), near_maps_.end(), split.near_maps);
    split.parts = TableAt<SplitPart>(launch.tables, parts_offset_);
    split.combines = TableAt<CombineTile>(launch.tables, combines_offset_);
    if (merges_) {
      split.tickets = const_cast<uint32_t*>(TableAt<uint32_t>(launch.tables, tickets_offset_));
    }
    arguments[0] = &split;
  }
  // The kernel of split keys may start early; it waits for the preceding work after its setup.
  cudaLaunchAttribute beside = {};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks_);
  config.blockDim = dim3(kernel_.threads);
  config.dynamicSmemBytes = kernel_.shared_bytes;
  config.stream = launch.stream;
  config.attrs = &beside;
  config.numAttrs = for_parts_ ? 1 : 0;
  absl::Status status =
      ToStatus(cudaLaunchKernelExC(&config, entry, arguments), "attention kernel launch");
  if (!status.ok() || merges_) return status;
  return split_.Combine(dtype_, forward, TableAt<CombineTile>(launch.tables, combines_offset_),
                        launch.stream, /*early=*/true);
}

}  // namespace ringattn::worker::cuda::sm90
