#include "worker/kernels/cuda/paged/sm90/sm90_attention.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "worker/kernels/cuda/launch/tensor_map_encoder.h"
#include "worker/kernels/cuda/paged/sm90/kernels.h"

namespace ringattn::worker::cuda::paged {
namespace {

using cuda::sm90::ForwardKernel;
using cuda::sm90::TensorMap;

// K and V of the heads that a prefill computes at one time: about half of an H200's L2 cache.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

struct HeadDimClass {
  int32_t head_dim;
  ForwardKernel (*decode)(bool parted);
  ForwardKernel (*prefill)(bool parted);
};
constexpr HeadDimClass kClasses[] = {
    {64, DecodeKernel_d64, PrefillKernel_d64},    {96, DecodeKernel_d96, PrefillKernel_d96},
    {128, DecodeKernel_d128, PrefillKernel_d128}, {192, DecodeKernel_d192, PrefillKernel_d192},
    {256, DecodeKernel_d256, PrefillKernel_d256},
};

const HeadDimClass& ClassOf(const CacheShape& shape) {
  const int32_t dim = std::max(shape.head_dim, shape.head_dim_v);
  return *std::find_if(std::begin(kClasses), std::end(kClasses),
                       [dim](const HeadDimClass& candidate) { return dim <= candidate.head_dim; });
}

ForwardKernel DecodeOf(const CacheShape& shape) {
  return ClassOf(shape).decode(/*parted=*/shape.position_parts > 1);
}
ForwardKernel PrefillOf(const CacheShape& shape) {
  return ClassOf(shape).prefill(/*parted=*/shape.position_parts > 1);
}

SplitShape SplitOf(const PagedProblem& problem) {
  return SplitShapeOf(problem, DecodeOf(problem.shape).tile_rows, kMaxDecodeQueries,
                      problem.device.sm_count);
}

// A 4-dimensional map in 128-byte swizzle, of boxes of 64 columns.
struct MapShape {
  const void* data;
  int64_t columns, heads, tokens, planes;
  int64_t token_bytes, plane_bytes;
  int32_t box_heads, box_tokens;
};
absl::Status Encode(DType dtype, const MapShape& shape, const char* name, TensorMap& target) {
  const auto encode = TensorMapEncoder();
  if (!encode.ok()) return encode.status();
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[4] = {size(shape.columns), size(shape.heads), size(shape.tokens),
                               size(shape.planes)};
  const cuuint64_t head_bytes = 2 * size(shape.columns);
  const cuuint64_t strides[3] = {head_bytes, size(shape.token_bytes), size(shape.plane_bytes)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(shape.box_heads),
                             static_cast<cuuint32_t>(shape.box_tokens), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  // A box has 128 bytes of a row. If the L2 cache fetched 256 bytes for each, a decode of long
  // sequences would read 4.20 in place of 4.57 TB/s (one H200).
  const CUtensorMapL2promotion promotion = head_bytes % 128 == 0
                                               ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                               : CU_TENSOR_MAP_L2_PROMOTION_L2_64B;
  CUtensorMap map;
  const CUresult result = (*encode)(
      &map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, const_cast<void*>(shape.data), sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (absl::Status status = EncodingStatus(result, name); !status.ok()) return status;
  static_assert(sizeof(map) == sizeof(target));
  std::memcpy(target.bytes, &map, sizeof(map));
  return absl::OkStatus();
}

// Boxes lie within a block and divide a tile of `tile_keys` keys.
absl::Status EncodeBlocks(const CacheShape& shape, const void* cache, int32_t tile_keys,
                          BlockMaps& maps) {
  while ((2 << maps.box_shift) <= shape.block_tokens && tile_keys % (2 << maps.box_shift) == 0) {
    ++maps.box_shift;
  }
  MapShape map;
  map.data = cache;
  map.columns = shape.head_dim;
  map.heads = shape.num_kv_heads;
  map.tokens = shape.blocks * shape.block_tokens;
  map.planes = shape.planes;
  map.token_bytes = shape.k_row_bytes();
  map.plane_bytes = shape.plane_bytes();
  map.box_heads = 1;
  map.box_tokens = 1 << maps.box_shift;
  if (absl::Status s = Encode(shape.dtype, map, "K's blocks", maps.k); !s.ok()) return s;
  map.data = static_cast<const char*>(cache) + shape.k_plane_bytes();
  map.columns = shape.head_dim_v;
  map.token_bytes = shape.v_row_bytes();
  return Encode(shape.dtype, map, "V's blocks", maps.v);
}

absl::Status EncodeQueries(const PagedProblem& problem, const void* q, int32_t box_heads,
                           int32_t box_queries, cuda::sm90::ForwardKernelParams& params) {
  MapShape map;
  map.data = q;
  map.columns = problem.shape.head_dim;
  map.heads = problem.options.num_heads;
  map.tokens = problem.batch.max_total_q;
  map.planes = 1;
  map.token_bytes = 2 * map.columns * map.heads;
  map.plane_bytes = map.token_bytes * map.tokens;
  map.box_heads = box_heads;
  map.box_tokens = box_queries;
  params.q_box_bytes = static_cast<uint32_t>(box_heads * box_queries * 128);
  return Encode(problem.shape.dtype, map, "q", params.q_map);
}

class Sm90Attention final : public PagedAttention {
 public:
  Sm90Attention(const PagedProblem& problem, const Buffers& buffers) : append_(problem, buffers) {}

  absl::Status Init(const PagedProblem& problem, const Buffers& buffers) {
    if (absl::Status status = append_.Load(); !status.ok()) return status;
    const SplitShape split = SplitOf(problem);
    const Workspace workspace(problem, split);
    zeroed_bytes_ = workspace.zeroed_bytes;
    if (absl::Status s = InitDecode(problem, buffers, split, workspace); !s.ok()) return s;
    if (problem.batch.max_q_tokens <= kMaxDecodeQueries) return absl::OkStatus();
    return InitPrefill(problem, buffers, workspace);
  }

  absl::Status Enqueue(cudaStream_t stream) const override {
    return Attend(/*appends=*/true, stream);
  }
  absl::Status EnqueueRead(cudaStream_t stream) const override {
    return Attend(/*appends=*/false, stream);
  }
  absl::Status EnqueueAppend(cudaStream_t stream) const override { return append_.Launch(stream); }
  bool signals_done() const override { return decode_.done.word != nullptr; }
  int64_t zeroed_bytes() const override { return zeroed_bytes_; }
  const char* kernels() const override { return "sm90"; }

 private:
  static KernelLaunch LaunchOf(const ForwardKernel& kernel, DType dtype, int64_t blocks) {
    KernelLaunch launch;
    launch.kernel = dtype == DType::kFloat16 ? kernel.fp16 : kernel.bf16;
    launch.blocks = blocks;
    launch.threads = kernel.threads;
    launch.shared_bytes = kernel.shared_bytes;
    return launch;
  }

  absl::Status InitDecode(const PagedProblem& problem, const Buffers& buffers,
                          const SplitShape& split, const Workspace& workspace) {
    const ForwardKernel kernel = DecodeOf(problem.shape);
    decode_.forward =
        ForwardParamsOf(problem, buffers, workspace, split.head_pack, split.tile_rows);
    decode_.step = StepParamsOf(problem, buffers);
    decode_.split = SplitParamsOf(problem, buffers, workspace, split);
    decode_.step_is_fetched = append_.fetches();
    if (problem.batch.max_q_tokens <= kMaxDecodeQueries && buffers.done != nullptr) {
      decode_.done.counter =
          reinterpret_cast<uint32_t*>(static_cast<char*>(buffers.workspace) + workspace.done);
      decode_.done.word = buffers.done;
    }
    absl::Status status =
        EncodeBlocks(problem.shape, buffers.cache, kernel.tile_keys, decode_.blocks);
    if (!status.ok()) return status;
    status = EncodeQueries(problem, buffers.q, split.head_pack, split.unit_queries, decode_);
    if (!status.ok()) return status;
    decode_launch_ =
        LaunchOf(kernel, problem.shape.dtype, int64_t{split.max_columns} * split.packs);
    return decode_launch_.Load();
  }

  absl::Status InitPrefill(const PagedProblem& problem, const Buffers& buffers,
                           const Workspace& workspace) {
    prefills_ = true;
    const ForwardKernel kernel = PrefillOf(problem.shape);
    prefill_.forward =
        ForwardParamsOf(problem, buffers, workspace, /*head_pack=*/1, kernel.tile_rows);
    prefill_.step = StepParamsOf(problem, buffers);
    prefill_.mask = MaskRuleOf(problem);
    prefill_.min_q = kMaxDecodeQueries + 1;
    prefill_.section_bytes = kSectionBytes;
    prefill_.counters = reinterpret_cast<cuda::sm90::WorkCounters*>(
        static_cast<char*>(buffers.workspace) + workspace.counters);
    absl::Status status =
        EncodeBlocks(problem.shape, buffers.cache, kernel.tile_keys, prefill_.blocks);
    if (!status.ok()) return status;
    status = EncodeQueries(problem, buffers.q, 1, kernel.tile_rows, prefill_);
    if (!status.ok()) return status;
    prefill_launch_ = LaunchOf(kernel, problem.shape.dtype, problem.device.sm_count);
    return prefill_launch_.Load();
  }

  absl::Status Attend(bool appends, cudaStream_t stream) const {
    if (absl::Status status = append_.Launch(stream, appends); !status.ok()) return status;
    absl::Status status = decode_launch_.Launch(&decode_, append_.launches(appends), stream);
    if (!status.ok() || !prefills_) return status;
    return prefill_launch_.Launch(&prefill_, /*overlap=*/false, stream);
  }

  AppendLaunch append_;
  DecodeParams decode_;
  PrefillParams prefill_;
  KernelLaunch decode_launch_;
  KernelLaunch prefill_launch_;
  bool prefills_ = false;
  int64_t zeroed_bytes_ = 0;
};

}  // namespace

bool Sm90Serves(const PagedProblem& problem) {
  const CacheShape& shape = problem.shape;
  if (problem.device.compute_major != 9 || shape.dtype == DType::kFloat32) return false;
  if (shape.head_dim % 8 != 0 || shape.head_dim_v % 8 != 0) return false;
  if (shape.k_row_bytes() % 16 != 0 || shape.v_row_bytes() % 16 != 0) return false;
  return std::max(DecodeOf(shape).shared_bytes, PrefillOf(shape).shared_bytes) <=
         problem.device.shared_bytes_per_block;
}

absl::StatusOr<std::unique_ptr<PagedAttention>> CreateSm90Attention(const PagedProblem& problem,
                                                                    const Buffers& buffers) {
  auto attention = std::make_unique<Sm90Attention>(problem, buffers);
  if (absl::Status status = attention->Init(problem, buffers); !status.ok()) return status;
  return attention;
}

int64_t Sm90WorkspaceBytes(const PagedProblem& problem) {
  return Workspace(problem, SplitOf(problem)).bytes;
}

}  // namespace ringattn::worker::cuda::paged
