#include "worker/kernels/cuda/cuda_kernels.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/elementwise.h"
#include "worker/kernels/cuda/simt_kernels.h"
#include "worker/kernels/cuda/sm80_kernels.h"

namespace ringattn::cuda {
namespace {

constexpr int64_t kMaximalGridZ = 65535;
constexpr int64_t kTableAlignment = 256;
constexpr float kLog2E = 1.4426950408889634f;

absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

absl::Status CheckProblem(const AttentionProblem& problem) {
  if (problem.head_dim < 1 || problem.head_dim > 256 || problem.head_dim_v < 1 ||
      problem.head_dim_v > 256) {
    return absl::InvalidArgumentError(absl::StrCat("head_dim ", problem.head_dim, " and ",
                                                   problem.head_dim_v, " must be in 1..256"));
  }
  if (problem.num_heads < 1 || problem.num_kv_heads < 1 ||
      problem.num_heads % problem.num_kv_heads != 0 || problem.num_heads > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("num_heads ", problem.num_heads,
                                                   " must be a multiple of num_kv_heads ",
                                                   problem.num_kv_heads, " and at most 65535"));
  }
  return absl::OkStatus();
}

// Path check: tensor-core kernels for 16-bit tensors where the device has the
// shared memory that they need, the fp32 path otherwise.
struct KernelFamily {
  TileKernel (*sm80[6])();
  TileKernel (*simt)(int head_dim_class);
};
constexpr int kSm80Classes[6] = {32, 64, 96, 128, 192, 256};

TileKernel Choose(const KernelFamily& family, const AttentionProblem& problem,
                  const DeviceInfo& device) {
  const int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  if (problem.dtype == DType::kFloat32) return family.simt(dim <= 64 ? 64 : dim <= 128 ? 128 : 256);
  for (int i = 0; i < 6; ++i) {
    if (dim > kSm80Classes[i]) continue;
    TileKernel kernel = family.sm80[i]();
    if (device.compute_major >= 9 && kernel.shared_bytes_sm90 > 0) {
      kernel.shared_bytes = kernel.shared_bytes_sm90;
    }
    if (kernel.shared_bytes <= device.shared_bytes_per_block) return kernel;
    break;
  }
  return family.simt(256);
}

constexpr KernelFamily kForwardKernels = {
    {Sm80ForwardKernel_d32, Sm80ForwardKernel_d64, Sm80ForwardKernel_d96, Sm80ForwardKernel_d128,
     Sm80ForwardKernel_d192, Sm80ForwardKernel_d256},
    SimtForwardKernel};
constexpr KernelFamily kBackwardKernels = {
    {Sm80BackwardKernel_d32, Sm80BackwardKernel_d64, Sm80BackwardKernel_d96,
     Sm80BackwardKernel_d128, Sm80BackwardKernel_d192, Sm80BackwardKernel_d256},
    SimtBackwardKernel};

TileKernel ChooseForward(const AttentionProblem& problem, const DeviceInfo& device) {
  return Choose(kForwardKernels, problem, device);
}

TileKernel ChooseBackward(const AttentionProblem& problem, const DeviceInfo& device) {
  return Choose(kBackwardKernels, problem, device);
}

const void* Entry(const TileKernel& kernel, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kernel.fp32;
    case DType::kBFloat16:
      return kernel.bf16;
    case DType::kFloat16:
      return kernel.fp16;
  }
  return nullptr;
}

bool Aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

CommonParams CommonOf(const AttentionProblem& problem, int64_t q_rows) {
  CommonParams common;
  common.q_rows = q_rows;
  common.batch = static_cast<int32_t>(problem.batch);
  common.num_heads = static_cast<int32_t>(problem.num_heads);
  common.num_kv_heads = static_cast<int32_t>(problem.num_kv_heads);
  common.group_size = static_cast<int32_t>(problem.num_heads / problem.num_kv_heads);
  common.head_dim = static_cast<int32_t>(problem.head_dim);
  common.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  common.softmax_scale = problem.softmax_scale;
  common.scale_log2 = problem.softmax_scale * kLog2E;
  common.softcap = problem.softcap;
  return common;
}

int64_t AlignUp(int64_t bytes) {
  return (bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
}

template <typename T>
int64_t TableBytes(const std::vector<T>& table) {
  return AlignUp(static_cast<int64_t>(table.size() * sizeof(T)));
}

template <typename T>
void WriteTable(const std::vector<T>& table, void* tables, int64_t offset) {
  if (table.empty()) return;
  std::memcpy(static_cast<char*>(tables) + offset, table.data(), table.size() * sizeof(T));
}

template <typename T>
const T* TableAt(const void* tables, int64_t offset) {
  return reinterpret_cast<const T*>(static_cast<const char*>(tables) + offset);
}

TableLaunch LaunchOf(const LaunchContext& context, int64_t table_bytes) {
  return {context.stream, context.workspace, static_cast<char*>(context.workspace) + table_bytes,
          context.stop_word};
}

absl::Status CheckWorkspace(const LaunchContext& context, int64_t device_bytes,
                            int64_t staging_bytes) {
  if (context.workspace_bytes >= device_bytes && context.staging_bytes >= staging_bytes) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("workspace of ", context.workspace_bytes, " device and ",
                   context.staging_bytes, " pinned bytes; this call needs ", device_bytes,
                   " and ", staging_bytes));
}

absl::Status UploadTables(const LaunchContext& context, int64_t bytes) {
  return ToStatus(cudaMemcpyAsync(context.workspace, context.staging, bytes,
                                  cudaMemcpyHostToDevice, context.stream),
                  "tile table upload");
}

// Fills params.dq_map. Needs rows of whole 16-byte units.
absl::Status EncodeDqMap(const TileKernel& kernel, BackwardParams& params) {
  const CommonParams& common = params.common;
  // Without an address the call is only being measured.
  if (params.dq_acc == nullptr) return absl::OkStatus();
  if (common.head_dim % 4 != 0 || !Aligned16(params.dq_acc)) return absl::OkStatus();
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  absl::Status status = ToStatus(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                       &found),
      "cuTensorMapEncodeTiled");
  if (!status.ok()) return status;
  if (found != cudaDriverEntryPointSuccess) {
    return absl::InternalError("the driver has no cuTensorMapEncodeTiled");
  }
  static_assert(sizeof(CUtensorMap) == sizeof(params.dq_map));
  const cuuint64_t row_bytes = cuuint64_t{4} * common.head_dim;
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(common.head_dim), static_cast<cuuint64_t>(common.num_heads),
      static_cast<cuuint64_t>(common.q_rows), static_cast<cuuint64_t>(common.batch)};
  const cuuint64_t strides[3] = {row_bytes, row_bytes * sizes[1], row_bytes * sizes[1] * sizes[2]};
  const cuuint32_t box[4] = {32, 1, static_cast<cuuint32_t>(kernel.tile_rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, params.dq_acc, sizes, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("tensor map of dq: CUDA error ", result));
  }
  std::memcpy(params.dq_map, &map, sizeof(map));
  params.has_dq_map = 1;
  return absl::OkStatus();
}

template <typename Params>
absl::Status LaunchTiles(const TileKernel& kernel, DType dtype, int64_t tiles, int64_t grid_y,
                         const Params& given, cudaStream_t stream) {
  Params params = given;
  const void* entry = Entry(kernel, dtype);
  absl::Status status = ToStatus(
      cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kernel.shared_bytes),
      "shared memory of an attention kernel");
  const int64_t batch = params.common.batch;
  for (int64_t begin = 0; begin < batch && status.ok(); begin += kMaximalGridZ) {
    params.common.batch_begin = static_cast<int32_t>(begin);
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(grid_y),
                    static_cast<unsigned>(std::min(batch - begin, kMaximalGridZ)));
    void* arguments[] = {&params};
    status = ToStatus(cudaLaunchKernel(entry, grid, dim3(kernel.threads), arguments,
                                       kernel.shared_bytes, stream),
                      "attention kernel launch");
  }
  return status;
}

}  // namespace

absl::StatusOr<DeviceInfo> QueryDevice(int device) {
  DeviceInfo info;
  cudaError_t error =
      cudaDeviceGetAttribute(&info.sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info.compute_major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info.shared_bytes_per_block,
                                   cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  absl::Status status = ToStatus(error, "device query");
  if (!status.ok()) return status;
  return info;
}

absl::Status LoadKernels() {
  std::vector<const void*> entries = ElementwiseKernels();
  const auto add = [&entries](const TileKernel& kernel) {
    for (const void* entry : {kernel.bf16, kernel.fp16, kernel.fp32}) {
      if (entry != nullptr) entries.push_back(entry);
    }
  };
  for (const void* entry : sm90::ForwardEntries()) entries.push_back(entry);
  for (const KernelFamily& family : {kForwardKernels, kBackwardKernels}) {
    for (TileKernel (*const kernel)() : family.sm80) add(kernel());
    for (int head_dim_class : {64, 128, 256}) add(family.simt(head_dim_class));
  }
  absl::Status status;
  for (size_t i = 0; i < entries.size() && status.ok(); ++i) {
    cudaFuncAttributes attributes;
    status = ToStatus(cudaFuncGetAttributes(&attributes, entries[i]), "loading a kernel");
  }
  return status;
}

absl::StatusOr<PreparedForward> PrepareForward(const ForwardCall& call, const DeviceInfo& device,
                                               const ForwardTuning& tuning) {
  const AttentionProblem& problem = *call.problem;
  if (absl::Status status = CheckProblem(problem); !status.ok()) return status;
  PreparedForward prepared;
  prepared.dtype_ = problem.dtype;
  if (sm90::ServesForward(call, device)) {
    auto hopper = sm90::PrepareForward(call, device, tuning);
    if (!hopper.ok()) return hopper.status();
    prepared.sm90_ = *std::move(hopper);
    prepared.tile_count_ = prepared.sm90_->has_work();
    prepared.params_.common.batch = static_cast<int32_t>(problem.batch);
    prepared.table_bytes_ = prepared.sm90_->table_bytes();
    prepared.scratch_bytes_ = prepared.sm90_->scratch_bytes();
    return prepared;
  }
  prepared.kernel_ = ChooseForward(problem, device);
  const TileKernel& kernel = prepared.kernel_;

  ForwardParams& params = prepared.params_;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.out_acc = call.out_acc;
  params.lse = call.lse;
  params.out = call.out;
  params.initial = call.initial;
  params.final = call.final;
  params.tile_rows = kernel.tile_rows;
  bool aligned_qk = problem.head_dim % 8 == 0 && Aligned16(call.q);
  bool aligned_v = problem.head_dim_v % 8 == 0;
  for (const KvBlock& block : call.blocks) {
    aligned_qk = aligned_qk && Aligned16(block.k);
    aligned_v = aligned_v && Aligned16(block.v);
  }
  params.common.vector_qk = aligned_qk;
  params.common.vector_v = aligned_v;

  // Short queries: all heads of a group share a tile, so that K/V are read once.
  int64_t longest_piece = 0;
  for (const Piece& piece : call.q_pieces) longest_piece = std::max(longest_piece, piece.length);
  const int64_t group_size = params.common.group_size;
  if (group_size > 1 && longest_piece * group_size <= kernel.tile_rows) {
    params.head_pack = static_cast<int32_t>(group_size);
  }

  ForwardTileShape shape;
  shape.q_rows = kernel.tile_rows / params.head_pack;
  shape.keys = kernel.tile_keys;
  shape.blocks_per_tile = problem.batch * problem.num_heads / params.head_pack;
  const int64_t blocks_per_sm = kernel.threads <= 128 ? 2 : 1;
  shape.target_blocks = tuning.max_key_splits == 1 ? 0 : device.sm_count * blocks_per_sm;
  prepared.plan_ = PlanForwardTiles(call, shape);

  const ForwardPlan& plan = prepared.plan_;
  prepared.tile_count_ = static_cast<int64_t>(plan.tiles.size());
  prepared.combine_count_ = static_cast<int64_t>(plan.combines.size());
  prepared.ranges_offset_ = TableBytes(plan.tiles);
  prepared.combines_offset_ = prepared.ranges_offset_ + TableBytes(plan.ranges);
  prepared.table_bytes_ = prepared.combines_offset_ + TableBytes(plan.combines);
  const int64_t partial_rows = plan.slots * shape.blocks_per_tile * kernel.tile_rows;
  prepared.partial_floats_ = partial_rows * problem.head_dim_v;
  prepared.scratch_bytes_ = AlignUp(prepared.partial_floats_ * 4) + AlignUp(partial_rows * 4);
  return prepared;
}

void PreparedForward::WriteTables(void* target) const {
  if (sm90_) return sm90_->WriteTables(target);
  WriteTable(plan_.tiles, target, 0);
  WriteTable(plan_.ranges, target, ranges_offset_);
  WriteTable(plan_.combines, target, combines_offset_);
}

absl::Status PreparedForward::Start(const LaunchContext& context) const {
  if (tile_count_ == 0 || params_.common.batch == 0) return absl::OkStatus();
  absl::Status status = CheckWorkspace(context, device_bytes(), staging_bytes());
  if (!status.ok()) return status;
  WriteTables(context.staging);
  status = UploadTables(context, table_bytes_);
  if (!status.ok()) return status;
  return Launch(LaunchOf(context, table_bytes_));
}

absl::Status PreparedForward::Launch(const TableLaunch& launch) const {
  if (tile_count_ == 0 || params_.common.batch == 0) return absl::OkStatus();
  if (sm90_) return sm90_->Launch(launch);
  ForwardParams params = params_;
  params.common.stop_word = launch.stop_word;
  params.tiles = TableAt<ForwardTile>(launch.tables, 0);
  params.ranges = TableAt<KvRange>(launch.tables, ranges_offset_);
  params.partial_out = static_cast<float*>(launch.scratch);
  params.partial_lse = params.partial_out + AlignUp(partial_floats_ * 4) / 4;
  absl::Status status = LaunchTiles(kernel_, dtype_, tile_count_,
                                    params.common.num_heads / params.head_pack, params,
                                    launch.stream);
  if (!status.ok() || combine_count_ == 0) return status;
  CombineParams combine;
  combine.tiles = TableAt<CombineTile>(launch.tables, combines_offset_);
  combine.forward = params;
  for (int64_t begin = 0; begin < params.common.batch && status.ok(); begin += kMaximalGridZ) {
    combine.forward.common.batch_begin = static_cast<int32_t>(begin);
    status = ToStatus(
        LaunchCombine(dtype_, combine, combine_count_,
                      std::min(params.common.batch - begin, kMaximalGridZ), launch.stream),
        "combine launch");
  }
  return status;
}

absl::StatusOr<PreparedBackward> PrepareBackward(const BackwardCall& call,
                                                 const DeviceInfo& device) {
  const AttentionProblem& problem = *call.problem;
  if (absl::Status status = CheckProblem(problem); !status.ok()) return status;
  PreparedBackward prepared;
  prepared.dtype_ = problem.dtype;
  prepared.kernel_ = ChooseBackward(problem, device);
  prepared.plan_ = PlanBackwardTiles(call, prepared.kernel_.tile_keys);

  BackwardParams& params = prepared.params_;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.dout = call.dout;
  params.lse = call.lse;
  params.delta = call.delta;
  params.dq_acc = call.dq_acc;
  bool aligned_qk = problem.head_dim % 8 == 0 && Aligned16(call.q);
  bool aligned_v = problem.head_dim_v % 8 == 0 && Aligned16(call.dout);
  for (const KvBlock& block : call.blocks) {
    aligned_qk = aligned_qk && Aligned16(block.k);
    aligned_v = aligned_v && Aligned16(block.v);
  }
  params.common.vector_qk = aligned_qk;
  params.common.vector_v = aligned_v;

  // head_dim classes whose kernel stages dq have the larger shared memory.
  const bool staged = device.compute_major >= 9 && prepared.kernel_.shared_bytes_sm90 > 0;
  if (staged && !prepared.plan_.tiles.empty()) {
    if (absl::Status status = EncodeDqMap(prepared.kernel_, params); !status.ok()) return status;
  }

  // All heads of a group in one block save dk/dv traffic; fewer per block give
  // the scheduler more, shorter blocks. Eight per SM keep the tail short.
  const int64_t wanted = int64_t{8} * device.sm_count;
  const int64_t tiles = static_cast<int64_t>(prepared.plan_.tiles.size()) * problem.batch;
  const int32_t group_size = params.common.group_size;
  params.heads_per_block = 1;
  for (int32_t heads = group_size; heads >= 1; --heads) {
    if (group_size % heads == 0 && tiles * (problem.num_heads / heads) >= wanted) {
      params.heads_per_block = heads;
      break;
    }
  }
  prepared.tile_count_ = static_cast<int64_t>(prepared.plan_.tiles.size());
  prepared.ranges_offset_ = TableBytes(prepared.plan_.tiles);
  prepared.table_bytes_ = prepared.ranges_offset_ + TableBytes(prepared.plan_.ranges);
  return prepared;
}

void PreparedBackward::WriteTables(void* target) const {
  WriteTable(plan_.tiles, target, 0);
  WriteTable(plan_.ranges, target, ranges_offset_);
}

absl::Status PreparedBackward::Start(const LaunchContext& context) const {
  if (tile_count_ == 0 || params_.common.batch == 0) return absl::OkStatus();
  absl::Status status = CheckWorkspace(context, device_bytes(), staging_bytes());
  if (!status.ok()) return status;
  WriteTables(context.staging);
  status = UploadTables(context, table_bytes_);
  if (!status.ok()) return status;
  return Launch(LaunchOf(context, table_bytes_));
}

absl::Status PreparedBackward::Launch(const TableLaunch& launch) const {
  if (tile_count_ == 0 || params_.common.batch == 0) return absl::OkStatus();
  BackwardParams params = params_;
  params.common.stop_word = launch.stop_word;
  params.tiles = TableAt<BackwardTile>(launch.tables, 0);
  params.ranges = TableAt<QRange>(launch.tables, ranges_offset_);
  return LaunchTiles(kernel_, dtype_, tile_count_,
                     params.common.num_heads / params.heads_per_block, params, launch.stream);
}

absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream) {
  return ToStatus(LaunchDelta(call, stream), "delta launch");
}

absl::Status StartZero(const ZeroCall& call, cudaStream_t stream) {
  if (call.bytes == 0) return absl::OkStatus();
  return ToStatus(cudaMemsetAsync(call.target, 0, call.bytes, stream), "zero");
}

absl::Status StartAdd(const AddCall& call, cudaStream_t stream) {
  return ToStatus(LaunchAdd(call, stream), "add launch");
}

absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream) {
  return ToStatus(LaunchConvert(call, stream), "convert launch");
}

}  // namespace ringattn::cuda
