#include "worker/kernels/cuda/paged/portable/portable_attention.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "worker/kernels/cuda/paged/portable/kernels.h"

namespace ringattn::worker::cuda::paged {
namespace {

// Thread blocks of a multiprocessor that registers have room for.
constexpr int32_t kMaxBlocksPerMultiprocessor = 2;

PortableKernel KernelOf(const CacheShape& shape) {
  const int32_t dim = std::max(shape.head_dim, shape.head_dim_v);
  const bool parted = shape.position_parts > 1;
  if (dim <= 64) return PortableKernel_d64(parted);
  if (dim <= 128) return PortableKernel_d128(parted);
  return PortableKernel_d256(parted);
}

int32_t SharedBytes(const CacheShape& shape) {
  const PortableKernel kernel = KernelOf(shape);
  return shape.dtype == DType::kFloat32 ? kernel.shared_bytes_fp32 : kernel.shared_bytes_16;
}

SplitShape SplitOf(const PagedProblem& problem) {
  const int32_t blocks =
      std::clamp(problem.device.shared_bytes_per_block / SharedBytes(problem.shape), 1,
                 kMaxBlocksPerMultiprocessor);
  return SplitShapeOf(problem, kPortableRows, std::numeric_limits<int32_t>::max(),
                      problem.device.sm_count * blocks);
}

class PortableAttention final : public PagedAttention {
 public:
  PortableAttention(const PagedProblem& problem, const Buffers& buffers)
      : append_(problem, buffers), overlaps_(problem.device.compute_major >= 9) {
    const CacheShape& shape = problem.shape;
    const SplitShape split = SplitOf(problem);
    const Workspace workspace(problem, split);
    zeroed_bytes_ = workspace.zeroed_bytes;
    params_.forward =
        ForwardParamsOf(problem, buffers, workspace, split.head_pack, split.tile_rows);
    params_.step = StepParamsOf(problem, buffers);
    params_.split = SplitParamsOf(problem, buffers, workspace, split);
    params_.cache = static_cast<const char*>(buffers.cache);
    params_.k_plane_bytes = shape.k_plane_bytes();
    params_.v_plane_bytes = shape.v_plane_bytes();
    const int64_t element = ElementBytes(shape.dtype);
    params_.k_row_elements = shape.k_row_bytes() / element;
    params_.v_row_elements = shape.v_row_bytes() / element;
    params_.vector = shape.head_dim * element % 16 == 0 && shape.head_dim_v * element % 16 == 0 &&
                     shape.k_row_bytes() % 16 == 0 && shape.v_row_bytes() % 16 == 0;
    const PortableKernel kernel = KernelOf(shape);
    launch_.kernel = shape.dtype == DType::kFloat32    ? kernel.fp32
                     : shape.dtype == DType::kBFloat16 ? kernel.bf16
                                                       : kernel.fp16;
    launch_.blocks = int64_t{split.max_columns} * split.packs;
    launch_.threads = kernel.threads;
    launch_.shared_bytes = SharedBytes(shape);
  }

  absl::Status Load() const {
    if (absl::Status status = append_.Load(); !status.ok()) return status;
    return launch_.Load();
  }

  absl::Status Enqueue(cudaStream_t stream) const override {
    return Attend(/*appends=*/true, stream);
  }
  absl::Status EnqueueRead(cudaStream_t stream) const override {
    return Attend(/*appends=*/false, stream);
  }
  absl::Status EnqueueAppend(cudaStream_t stream) const override { return append_.Launch(stream); }
  bool signals_done() const override { return false; }
  int64_t zeroed_bytes() const override { return zeroed_bytes_; }
  const char* kernels() const override { return "portable"; }

 private:
  absl::Status Attend(bool appends, cudaStream_t stream) const {
    if (absl::Status status = append_.Launch(stream, appends); !status.ok()) return status;
    // The kernel reads the step before it waits for the append, so not while that is fetched.
    const bool overlap = overlaps_ && append_.launches(appends) && !append_.fetches();
    return launch_.Launch(&params_, overlap, stream);
  }

  AppendLaunch append_;
  PortableParams params_;
  KernelLaunch launch_;
  bool overlaps_;
  int64_t zeroed_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PagedAttention>> CreatePortableAttention(const PagedProblem& problem,
                                                                        const Buffers& buffers) {
  auto attention = std::make_unique<PortableAttention>(problem, buffers);
  if (absl::Status status = attention->Load(); !status.ok()) return status;
  return attention;
}

int64_t PortableWorkspaceBytes(const PagedProblem& problem) {
  return Workspace(problem, SplitOf(problem)).bytes;
}

}  // namespace ringattn::worker::cuda::paged
