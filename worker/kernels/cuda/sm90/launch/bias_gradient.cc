#include "worker/kernels/cuda/sm90/launch/bias_gradient.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/sm90/launch/span_maps.h"
#include "worker/kernels/cuda/sm90/launch/tensor_maps.h"
#include "worker/kernels/cuda/sm90/terms/terms_classes.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

// Each SM runs one block at a time. With this many blocks per SM the longest one of a causal call
// is a small fraction of the total.
constexpr int64_t kBlocksPerSm = 4;
constexpr int32_t kPairKeys = 128;  // of the pair tables: two of the kernel's tiles

ForwardKernel KernelOf(const AttentionProblem& problem) {
  return std::max(problem.head_dim, problem.head_dim_v) > 64 ? BiasGradientKernel_d128()
                                                             : BiasGradientKernel_d64();
}

// Returns a forward call with the call's queries and keys, for the forward planner. Only tiles with
// keys matter.
ForwardCall QueryView(const BiasGradientCall& call) {
  ForwardCall view;
  view.problem = call.problem;
  view.q_rows = call.q_rows;
  view.q_pieces = call.q_pieces;
  view.blocks = call.blocks;
  view.terms = call.terms;
  return view;
}

}  // namespace

bool TakesBiasGradient(const BiasGradientCall& call, const DeviceInfo& device) {
  if (KernelOf(*call.problem).shared_bytes > device.shared_bytes_per_block) return false;
  bool aligned = Aligned16(call.q) && Aligned16(call.dout);
  for (const KvBlock& block : call.blocks) {
    aligned = aligned && Aligned16(block.k) && Aligned16(block.v);
  }
  return aligned && OneStride(call.q_pieces, call.blocks) &&
         TakesBias(*call.problem, call.terms, call.blocks, StrideOf(call.q_pieces, call.blocks));
}

std::vector<KernelEntry> BiasGradientEntries() {
  std::vector<KernelEntry> entries;
  for (const ForwardKernel& kernel : {BiasGradientKernel_d64(), BiasGradientKernel_d128()}) {
    for (const void* address : {kernel.bf16, kernel.fp16}) {
      entries.push_back({address, kernel.shared_bytes});
    }
  }
  return entries;
}

absl::StatusOr<std::unique_ptr<PreparedBiasGradient>> PreparedBiasGradient::Create(
    const BiasGradientCall& call, const DeviceInfo& device) {
  std::unique_ptr<PreparedBiasGradient> prepared(new PreparedBiasGradient);
  if (absl::Status status = prepared->Init(call, device); !status.ok()) return status;
  return prepared;
}

absl::Status PreparedBiasGradient::Init(const BiasGradientCall& call, const DeviceInfo& device) {
  const AttentionProblem& problem = *call.problem;
  const BiasForm& form = *problem.terms.bias;
  kernel_ = KernelOf(problem);
  dtype_ = problem.dtype;
  BiasGradientKernelParams& params = params_;
  params.forward.common = CommonOf(problem, call.q_rows);
  params.lse = call.lse;
  params.delta = call.delta;
  params.dbias = call.dbias;
  params.stride = StrideOf(call.q_pieces, call.blocks);
  params.keys = PhiloxKeysOf(problem);
  params.vectors = params.stride == 1 && problem.terms.columns % 8 == 0 && Aligned16(call.dbias);

  const ForwardCall view = QueryView(call);
  ForwardTileShape shape;
  params.forward.tile_rows = shape.q_rows = kernel_.tile_rows;
  shape.keys = kernel_.tile_keys;
  shape.key_align = kBiasKeyAlign;
  plan_ = PlanForwardTiles(view, shape);
  const int64_t tiles = params.tiles = static_cast<int32_t>(plan_.tiles.size());
  const int64_t planes =
      (form.per_batch ? problem.batch : 1) * (form.per_head ? problem.num_heads : 1);
  int64_t most_keys = 0;
  for (const ForwardTile& tile : plan_.tiles) {
    int64_t keys = 0;
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      keys += (plan_.ranges[i].row_count + kernel_.tile_keys - 1) / kernel_.tile_keys;
    }
    most_keys = std::max(most_keys, keys);
  }
  const int64_t wanted = kBlocksPerSm * device.sm_count;
  const int64_t blocks = tiles * planes;
  const int64_t parts = blocks == 0 ? 1
                                    : std::clamp<int64_t>((wanted + blocks - 1) / blocks, 1,
                                                          std::max<int64_t>(most_keys, 1));
  blocks_ = problem.batch == 0 ? 0 : blocks * parts;
  if (blocks_ > std::numeric_limits<int32_t>::max()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a bias gradient needs ", blocks_,
                     " blocks (tiles times planes); the maximum is 2147483647"));
  }
  params.planes = static_cast<int32_t>(planes);
  params.parts = static_cast<int32_t>(parts);

  MappedTensor queries;
  queries.heads = problem.num_heads;
  queries.rows = queries.row_pitch = call.q_rows;
  queries.batch = problem.batch;
  queries.box_rows = kernel_.tile_rows;
  queries.data = call.q;
  queries.columns = problem.head_dim;
  if (absl::Status s = EncodeMap(dtype_, queries, params.q_map); !s.ok()) return s;
  queries.data = call.dout;
  queries.columns = problem.head_dim_v;
  if (absl::Status s = EncodeMap(dtype_, queries, params.dout_map); !s.ok()) return s;
  absl::Status status = MapKeys(problem, call.blocks, kernel_.tile_keys, maps_);
  if (!status.ok()) return status;
  status = terms_.Init(view, plan_, kernel_.tile_rows, kPairKeys, problem.num_heads);
  if (!status.ok()) return status;
  status = bias_.Init(problem, call.terms, call.q_rows, call.blocks, params.stride);
  if (!status.ok()) return status;

  ranges_offset_ = TableBytes(plan_.tiles);
  maps_offset_ = ranges_offset_ + TableBytes(plan_.ranges);
  terms_offset_ = maps_offset_ + TableBytes(maps_);
  table_bytes_ = terms_offset_ + terms_.table_bytes();
  bias_scratch_offset_ = terms_.scratch_bytes();
  scratch_bytes_ = bias_scratch_offset_ + bias_.scratch_bytes();
  return absl::OkStatus();
}

void PreparedBiasGradient::WriteTables(void* target) const {
  WriteTable(plan_.tiles, target, 0);
  WriteTable(plan_.ranges, target, ranges_offset_);
  WriteTable(maps_, target, maps_offset_);
  terms_.WriteTables(static_cast<char*>(target) + terms_offset_);
}

absl::Status PreparedBiasGradient::Launch(const TableLaunch& launch) const {
  if (!has_work()) return absl::OkStatus();
  BiasGradientKernelParams params = params_;
  params.forward.common.stop_word = launch.stop_word;
  params.forward.tiles = TableAt<ForwardTile>(launch.tables, 0);
  params.forward.ranges = TableAt<KvRange>(launch.tables, ranges_offset_);
  params.maps = TableAt<SpanMaps>(launch.tables, maps_offset_);
  char* const scratch = static_cast<char*>(launch.scratch);
  terms_.Place(TableAt<char>(launch.tables, terms_offset_), scratch, params.terms, params.pairs);
  absl::Status status =
      ToStatus(LaunchPairClasses(params, kPairKeys, launch.stream), "score term classes launch");
  if (!status.ok()) return status;
  status =
      bias_.Place(scratch + bias_scratch_offset_, kForwardBiasRows, launch.stream, params.bias);
  if (!status.ok()) return status;
  const void* entry = dtype_ == DType::kFloat16 ? kernel_.fp16 : kernel_.bf16;
  void* arguments[] = {&params};
  return ToStatus(
      cudaLaunchKernel(entry, dim3(static_cast<unsigned>(blocks_)), dim3(kernel_.threads),
                       arguments, kernel_.shared_bytes, launch.stream),
      "bias gradient launch");
}

}  // namespace ringattn::worker::cuda::sm90
