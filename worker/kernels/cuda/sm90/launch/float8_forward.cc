#include "worker/kernels/cuda/sm90/launch/float8_forward.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/sm90/forward/keyless_rows.h"
#include "worker/kernels/cuda/sm90/launch/forward.h"
#include "worker/kernels/cuda/sm90/launch/tensor_maps.h"
#include "worker/kernels/cuda/sm90/launch/work_shifts.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int64_t kMaxHeadDim = kFloat8MaxColumns;

// The copy engine requires strides and first elements of the innermost axis at multiples of 16
// bytes. In v's copy the innermost axis is keys.
constexpr int32_t kVectorRows = 16;
int64_t WholeVectors(int64_t rows) { return (rows + kVectorRows - 1) / kVectorRows * kVectorRows; }

// Returns the head-dim class that serves a problem.
int32_t ColumnsOf(const AttentionProblem& problem) {
  return std::max(problem.head_dim, problem.head_dim_v) <= 64 ? 64 : 128;
}
ForwardKernel KernelOf(int32_t columns) {
  return columns == 64 ? Float8ForwardKernel_d64() : Float8ForwardKernel_d128();
}

// Counts the tiles that see keys; the others come last.
int32_t TilesWithKeys(const ForwardPlan& plan) {
  size_t tiles = plan.tiles.size();
  while (tiles > 0 && plan.tiles[tiles - 1].range_begin == plan.tiles[tiles - 1].range_end) --tiles;
  return static_cast<int32_t>(tiles);
}

}  // namespace

bool ServesFloat8Forward(const AttentionProblem& problem, const DeviceInfo& device) {
  if (problem.dtype == DType::kFloat32 || device.compute_major != 9) return false;
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return false;
  if (std::max(problem.head_dim, problem.head_dim_v) > kMaxHeadDim) return false;
  return !problem.terms.any() &&
         Float8ForwardKernel_d128().shared_bytes <= device.shared_bytes_per_block;
}

std::vector<KernelEntry> Float8ForwardEntries() {
  std::vector<KernelEntry> entries;
  for (const ForwardKernel& kernel : {Float8ForwardKernel_d64(), Float8ForwardKernel_d128()}) {
    for (const void* address : {kernel.bf16, kernel.fp16}) {
      entries.push_back({address, kernel.shared_bytes});
    }
  }
  for (const void* address : Float8RoundingEntries()) entries.push_back({address, 0});
  return entries;
}

absl::StatusOr<std::unique_ptr<PreparedFloat8Forward>> PreparedFloat8Forward::Create(
    const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning) {
  std::unique_ptr<PreparedFloat8Forward> prepared(new PreparedFloat8Forward(call, device, tuning));
  const int64_t items = int64_t{prepared->params_.tiles} * prepared->params_.heads;
  if (items > std::numeric_limits<int32_t>::max()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a forward call needs ", items,
                     " work items (tiles times heads); the maximum is 2147483647"));
  }
  return prepared;
}

PreparedFloat8Forward::PreparedFloat8Forward(const ForwardCall& call, const DeviceInfo& device,
                                             const KernelTuning& tuning)
    : PreparedKernel(kName, kFloat8KernelClass),
      columns_(ColumnsOf(*call.problem)),
      kernel_(KernelOf(columns_)),
      dtype_(call.problem->dtype) {
  const AttentionProblem& problem = *call.problem;
  ForwardParams& forward = params_.forward;
  forward.common = CommonOf(problem, call.q_rows);
  forward.lse = call.lse;
  forward.sinks = call.sinks;
  SetResult(call, forward);
  forward.tile_rows = kernel_.tile_rows;
  const int32_t pack = forward.head_pack = HeadPack(call, kernel_.tile_rows);

  ForwardTileShape shape;
  shape.q_rows = kernel_.tile_rows / pack;
  shape.keys = kernel_.tile_keys;
  shape.blocks_per_tile = problem.batch * (problem.num_heads / pack);
  shape.target_blocks = tuning.max_key_splits == 1 ? 0 : device.sm_count;
  shape.key_align = kVectorRows;
  plan_ = PlanForwardTiles(call, shape);
  params_.tiles = TilesWithKeys(plan_);
  keyless_tiles_ = static_cast<int32_t>(plan_.tiles.size()) - params_.tiles;
  params_.heads = static_cast<int32_t>(shape.blocks_per_tile);
  params_.section_heads = SectionHeads(call, plan_, params_.tiles, forward.common.group_size / pack,
                                       shape.blocks_per_tile, device.sm_count, /*element_bytes=*/1);
  params_.q_box_bytes = static_cast<uint32_t>(shape.q_rows) * pack * kFloat8MaxColumns;
  const ShiftedLaunch undivided =
      DivideIntoShifts(int64_t{params_.tiles} * params_.heads, device.sm_count, 0, -1);
  params_.shifts = undivided.shifts;
  grid_ = undivided.blocks;

  rounding_.batch = forward.common.batch;
  rounding_.num_heads = forward.common.num_heads;
  rounding_.num_kv_heads = forward.common.num_kv_heads;
  rounding_.head_dim = forward.common.head_dim;
  rounding_.head_dim_v = forward.common.head_dim_v;
  split_ = SplitKeys(plan_, forward);
  LayOutScratch(call);

  for (const Block& block : blocks_) maps_.resize(maps_.size() + block.pieces.size());
  tiles_offset_ = AlignUp(sizeof(WorkCounters));
  ranges_offset_ = tiles_offset_ + TableBytes(plan_.tiles);
  combines_offset_ = ranges_offset_ + TableBytes(plan_.ranges);
  maps_offset_ = combines_offset_ + TableBytes(plan_.combines);
  float8_tiles_offset_ = maps_offset_ + TableBytes(maps_);
  table_bytes_ = float8_tiles_offset_ + TableBytes(float8_tiles_);
}

void PreparedFloat8Forward::LayOutScratch(const ForwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  int64_t end = AlignUp(split_.scratch_bytes());
  const auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = AlignUp(end + bytes);
    return begin;
  };
  largest_bytes_ = 3 * problem.batch * problem.num_kv_heads * 4;
  largest_offset_ = take(largest_bytes_);
  const int64_t row_bytes = Float8RowBytes(problem.head_dim);
  q_offset_ = take(problem.batch * call.q_rows * problem.num_heads * row_bytes);
  AddTiles(call.q, q_offset_, call.q_rows, call.q_pieces, kFloat8Q, 0);
  for (const KvBlock& given : call.blocks) {
    const int64_t planes = problem.batch * problem.num_kv_heads;
    Block& block = blocks_.emplace_back();
    block.pieces = given.pieces;
    block.rows = given.rows;
    block.k = take(planes * block.rows * row_bytes);
    AddTiles(given.k, block.k, block.rows, block.pieces, kFloat8K, 0);
    for (const Piece& piece : block.pieces) {
      const int64_t pitch = WholeVectors(piece.length);
      block.v.push_back(take(planes * pitch * problem.head_dim_v));
      AddTiles(given.v, block.v.back(), block.rows, {piece}, kFloat8V, pitch);
    }
  }
  rounded_tiles_ = static_cast<int32_t>(float8_tiles_.size());
  scratch_bytes_ = end;
}

void PreparedFloat8Forward::AddTiles(const void* source, int64_t target, int64_t rows,
                                     const std::vector<Piece>& pieces, Float8Kind kind,
                                     int64_t pitch) {
  // The maps of q cover several heads.
  const CommonParams& common = params_.forward.common;
  const int64_t step =
      kind == kFloat8Q ? std::max(kFloat8TileRows / common.group_size, 8) : kFloat8TileRows;
  for (const Piece& piece : pieces) {
    for (int64_t at = 0; at < piece.length; at += step) {
      Float8Tile& tile = float8_tiles_.emplace_back();
      tile.source = source;
      tile.target = target;
      tile.tensor_rows = rows;
      tile.row_begin = piece.local_begin + at;
      tile.rows = static_cast<int32_t>(std::min(step, piece.length - at));
      tile.kind = kind;
      tile.pitch = pitch;
      tile.column = at;
    }
  }
}

absl::Status PreparedFloat8Forward::PlaceScratch(void* scratch) {
  char* const base = static_cast<char*>(scratch);
  const CommonParams& common = params_.forward.common;
  const int32_t pack = params_.forward.head_pack;
  ByteTensor q;
  q.data = base + q_offset_;
  const int64_t row_bytes = Float8RowBytes(common.head_dim);
  q.sizes = {row_bytes, common.num_heads, common.q_rows, common.batch};
  q.strides = {row_bytes, row_bytes * q.sizes[1], row_bytes * q.sizes[1] * q.sizes[2]};
  q.box = {kFloat8MaxColumns, pack, kernel_.tile_rows / pack, 1};
  if (absl::Status s = EncodeByteMap(q, params_.q_map); !s.ok()) return s;
  size_t at = 0;
  for (const Block& block : blocks_) {
    for (size_t i = 0; i < block.pieces.size(); ++i) {
      const Piece& piece = block.pieces[i];
      SpanMaps& maps = maps_[at++];
      if (piece.length == 0) continue;
      const int64_t heads = common.num_kv_heads;
      // Elements after the piece read as zero, including those of other pieces.
      const int64_t end = piece.local_begin + piece.length;
      ByteTensor k;
      k.data = base + block.k;
      k.sizes = {row_bytes, heads, end, common.batch};
      k.strides = {row_bytes, row_bytes * heads, row_bytes * heads * block.rows};
      k.box = {kFloat8MaxColumns, 1, kernel_.tile_keys, 1};
      if (absl::Status s = EncodeByteMap(k, maps.k); !s.ok()) return s;
      // Each piece has a separate copy of v, so that it begins at a multiple of 16 keys. The map's
      // base is shifted so that the piece's first row keeps its index in the block. Nothing before
      // the piece is read.
      const int64_t first = piece.local_begin / kVectorRows * kVectorRows;
      const int64_t pitch = WholeVectors(piece.length);
      ByteTensor v;
      v.data = base + block.v[i] - first;
      v.sizes = {first + pitch, heads, common.head_dim_v, common.batch};
      v.strides = {pitch * common.head_dim_v, pitch, pitch * common.head_dim_v * heads};
      v.box = {kernel_.tile_keys, 1, columns_, 1};
      if (absl::Status s = EncodeByteMap(v, maps.v); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

void PreparedFloat8Forward::WriteTables(void* target) const {
  std::memset(target, 0, tiles_offset_);
  WriteTable(plan_.tiles, target, tiles_offset_);
  WriteTable(plan_.ranges, target, ranges_offset_);
  WriteTable(plan_.combines, target, combines_offset_);
  WriteTable(maps_, target, maps_offset_);
  WriteTable(float8_tiles_, target, float8_tiles_offset_);
}

void PreparedFloat8Forward::DropTables() {
  plan_ = {};
  maps_ = {};
  float8_tiles_ = {};
  blocks_ = {};
}

absl::Status PreparedFloat8Forward::Launch(const TableLaunch& launch) const {
  if (params_.heads == 0 || params_.tiles + keyless_tiles_ == 0) return absl::OkStatus();
  char* const scratch = static_cast<char*>(launch.scratch);
  auto* const largest = reinterpret_cast<uint32_t*>(scratch + largest_offset_);
  Float8ForwardParams params;
  params.forward = params_;
  params.largest = largest;
  ForwardParams& forward = params.forward.forward;
  forward.common.stop_word = launch.stop_word;
  forward.tiles = TableAt<ForwardTile>(launch.tables, tiles_offset_);
  forward.ranges = TableAt<KvRange>(launch.tables, ranges_offset_);
  split_.Place(scratch, forward);
  params.forward.maps = TableAt<SpanMaps>(launch.tables, maps_offset_);
  params.forward.counters = const_cast<WorkCounters*>(TableAt<WorkCounters>(launch.tables, 0));

  if (keyless_tiles_ > 0) {
    const absl::Status status =
        ToStatus(LaunchKeylessRows(dtype_, forward, forward.tiles + params_.tiles, keyless_tiles_,
                                   launch.stream),
                 "keyless rows launch");
    if (!status.ok() || params_.tiles == 0) return status;
  }
  absl::Status status =
      ToStatus(cudaMemsetAsync(largest, 0, largest_bytes_, launch.stream), "zero of magnitudes");
  if (!status.ok()) return status;
  Float8RoundingParams rounding = rounding_;
  rounding.tiles = TableAt<Float8Tile>(launch.tables, float8_tiles_offset_);
  rounding.scratch = scratch;
  rounding.largest = largest;
  rounding.stop_word = launch.stop_word;
  status = ToStatus(LaunchFloat8Rounding(dtype_, rounding, rounded_tiles_, launch.stream),
                    "e4m3 rounding launch");
  if (!status.ok()) return status;
  const void* entry = dtype_ == DType::kFloat16 ? kernel_.fp16 : kernel_.bf16;
  void* arguments[] = {&params};
  status = ToStatus(cudaLaunchKernel(entry, dim3(grid_), dim3(kernel_.threads), arguments,
                                     kernel_.shared_bytes, launch.stream),
                    "attention kernel launch");
  if (!status.ok()) return status;
  return split_.Combine(dtype_, forward, TableAt<CombineTile>(launch.tables, combines_offset_),
                        launch.stream, /*early=*/true);
}

}  // namespace ringattn::worker::cuda::sm90
