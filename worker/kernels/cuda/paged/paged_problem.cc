#include "worker/kernels/cuda/paged/paged_problem.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/paged/append.h"

namespace ringattn::worker::cuda::paged {
namespace {

constexpr int32_t kMaxHeadDim = 256;
constexpr int64_t kMaxRowElements = int64_t{1} << 24;
constexpr int32_t kMaxRows = 65535;  // the append's grid has one line of blocks for each row
constexpr int32_t kMaxPositionParts = 1 << 16;
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr float kLog2E = 1.4426950408889634f;
constexpr int32_t kAppendBlocksPerMultiprocessor = 8;
// One thread block fetches it.
constexpr int64_t kMaxFetchedBytes = int64_t{1} << 20;

absl::Status CheckRange(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", value, "; it must be from ", least, " to ", most));
}

// Elements of a row of K or V; 0: as many as the heads have.
absl::Status CheckRow(const char* name, int32_t elements, int64_t least) {
  if (elements == 0) return absl::OkStatus();
  return CheckRange(name, elements, least, kMaxRowElements);
}

absl::Status FirstError(std::initializer_list<absl::Status> statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

int32_t BlockShiftOf(const CacheShape& shape) {
  int32_t shift = 0;
  while ((1 << shift) < shape.block_tokens) ++shift;
  return shift;
}

absl::Status CheckAddress(const char* name, const void* address, int64_t alignment,
                          bool required = true) {
  if (address == nullptr) {
    return required ? absl::InvalidArgumentError(absl::StrCat(name, " is null")) : absl::OkStatus();
  }
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be aligned to ", alignment, " bytes"));
}

}  // namespace

absl::Status CheckProblem(const PagedProblem& problem) {
  const CacheShape& shape = problem.shape;
  const AttentionOptions& options = problem.options;
  const BatchClass& batch = problem.batch;
  absl::Status status = FirstError({
      CheckRange("head_dim", shape.head_dim, 1, kMaxHeadDim),
      CheckRange("head_dim_v", shape.head_dim_v, 1, kMaxHeadDim),
      CheckRange("num_kv_heads", shape.num_kv_heads, 1, 65535),
      CheckRange("num_heads", options.num_heads, 1, 65535),
      CheckRange("block_tokens", shape.block_tokens, 16, 256),
      CheckRange("blocks", shape.blocks, 1, kMaxTokens / 16),
      CheckRange("planes", shape.planes, 1, 65535),
      CheckRange("position_parts", shape.position_parts, 1, kMaxPositionParts),
      CheckRange("position_part", shape.position_part, 0, shape.position_parts - 1),
      CheckRow("k_row_elements", shape.k_row_elements,
               int64_t{shape.num_kv_heads} * shape.head_dim),
      CheckRow("v_row_elements", shape.v_row_elements,
               int64_t{shape.num_kv_heads} * shape.head_dim_v),
      CheckRange("max_rows", batch.max_rows, 1, kMaxRows),
      CheckRange("max_total_q", batch.max_total_q, 1, kMaxTokens / options.num_heads),
      CheckRange("max_q_tokens", batch.max_q_tokens, 1, batch.max_total_q),
      CheckRange("max_append_tokens", batch.max_append_tokens, 0, kMaxTokens),
      CheckRange("splits", batch.splits, 0, kMaxSplits),
      CheckRange("window_left", options.window_left, -1, kMaxTokens),
  });
  if (!status.ok()) return status;
  if ((shape.block_tokens & (shape.block_tokens - 1)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("block_tokens is ", shape.block_tokens,
                                                   "; it must be 16, 32, 64, 128 or 256"));
  }
  if (shape.blocks * shape.block_tokens > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("a plane of ", shape.blocks, " blocks of ", shape.block_tokens,
                     " tokens is too large; the maximum is ", kMaxTokens, " tokens"));
  }
  if (options.num_heads % shape.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("num_heads is ", options.num_heads,
                                                   "; it must be a multiple of num_kv_heads, ",
                                                   shape.num_kv_heads));
  }
  if (shape.position_parts > 1 && !options.partial) {
    return absl::InvalidArgumentError(
        absl::StrCat("position_parts is ", shape.position_parts,
                     "; results of one part are partial, so options.partial must be true"));
  }
  if (!(options.softcap >= 0.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("softcap is ", options.softcap, "; it must be 0 (none) or positive"));
  }
  return absl::OkStatus();
}

absl::Status CheckBuffers(const PagedProblem& problem, const Buffers& buffers) {
  const bool appends = problem.batch.max_append_tokens > 0;
  return FirstError({
      CheckAddress("cache", buffers.cache, 16),
      CheckAddress("step", buffers.step, 16),
      CheckAddress("rows", buffers.rows, 16),
      CheckAddress("tables", buffers.tables, 4),
      CheckAddress("q", buffers.q, 16),
      CheckAddress("k", buffers.k, 16, appends),
      CheckAddress("v", buffers.v, 16, appends),
      CheckAddress("out", buffers.out, 16),
      CheckAddress("lse", buffers.lse, 4, /*required=*/false),
      CheckAddress("sinks", buffers.sinks, 4, /*required=*/false),
      CheckAddress("workspace", buffers.workspace, 256),
      CheckAddress("done", buffers.done, 4, /*required=*/false),
      CheckRange("fetched.bytes", buffers.fetched.bytes, 0, kMaxFetchedBytes),
      CheckAddress("fetched.source", buffers.fetched.source, 16, buffers.fetched.bytes > 0),
      CheckAddress("fetched.target", buffers.fetched.target, 16, buffers.fetched.bytes > 0),
      buffers.fetched.bytes % 16 == 0
          ? absl::OkStatus()
          : absl::InvalidArgumentError(absl::StrCat("fetched.bytes is ", buffers.fetched.bytes,
                                                    "; it must be a multiple of 16")),
  });
}

SplitShape SplitShapeOf(const PagedProblem& problem, int32_t tile_rows, int32_t max_q,
                        int32_t blocks) {
  SplitShape split;
  const int32_t group = problem.group_size();
  // Equal packs: the largest divisor of the group that a tile has room for.
  split.head_pack = std::min(group, tile_rows);
  while (group % split.head_pack != 0) --split.head_pack;
  split.packs = problem.options.num_heads / split.head_pack;
  split.tile_rows = tile_rows;
  split.max_q = std::min(problem.batch.max_q_tokens, max_q);
  split.unit_queries = std::min(tile_rows / split.head_pack, split.max_q);
  split.max_columns = problem.batch.splits > 0 ? problem.batch.splits
                                               : std::clamp(blocks / split.packs, 1, kMaxSplits);
  split.tickets = TicketsOf(problem.batch.max_total_q, problem.batch.max_rows, split.unit_queries) *
                  split.packs;
  split.group_tickets = SlotsOf(split.max_columns) * split.packs;
  return split;
}

Workspace::Workspace(const PagedProblem& problem, const SplitShape& split) {
  const int64_t rows = SlotsOf(split.max_columns) * split.packs * split.tile_rows;
  done = counters + kTableAlignment / 2;
  tickets = counters + kTableAlignment;
  group_tickets = tickets + AlignUp(split.tickets * 4);
  zeroed_bytes = group_tickets + AlignUp(split.group_tickets * 4);
  lse = std::max(zeroed_bytes, AlignUp(problem.batch.counter_bytes));
  partial_lse = lse + AlignUp(int64_t{problem.options.num_heads} * problem.batch.max_total_q * 4);
  partial_out = partial_lse + AlignUp(rows * 4);
  bytes = partial_out + AlignUp(rows * problem.shape.head_dim_v * 4);
}

MaskRule MaskRuleOf(const PagedProblem& problem) {
  MaskRule mask;
  mask.causal = problem.options.causal ? 1 : 0;
  mask.window_left = problem.options.window_left;
  mask.part.count = problem.shape.position_parts;
  mask.part.index = problem.shape.position_part;
  mask.part.block_shift = BlockShiftOf(problem.shape);
  return mask;
}

StepParams StepParamsOf(const PagedProblem& problem, const Buffers& buffers) {
  StepParams step;
  step.step = buffers.step;
  step.rows = buffers.rows;
  step.tables = buffers.tables;
  step.max_rows = problem.batch.max_rows;
  step.block_shift = BlockShiftOf(problem.shape);
  step.plane_tokens = static_cast<int32_t>(problem.shape.blocks * problem.shape.block_tokens);
  return step;
}

ForwardParams ForwardParamsOf(const PagedProblem& problem, const Buffers& buffers,
                              const Workspace& workspace, int32_t head_pack, int32_t tile_rows) {
  char* const scratch = static_cast<char*>(buffers.workspace);
  const auto floats = [scratch](int64_t offset) {
    return reinterpret_cast<float*>(scratch + offset);
  };
  ForwardParams forward;
  CommonParams& common = forward.common;
  common.q_rows = problem.batch.max_total_q;
  common.batch = 1;
  common.num_heads = problem.options.num_heads;
  common.num_kv_heads = problem.shape.num_kv_heads;
  common.group_size = problem.group_size();
  common.head_dim = problem.shape.head_dim;
  common.head_dim_v = problem.shape.head_dim_v;
  common.softmax_scale = problem.options.softmax_scale;
  common.scale_log2 = problem.options.softmax_scale * kLog2E;
  common.softcap = problem.options.softcap;
  forward.q = buffers.q;
  const bool partial = problem.options.partial;
  forward.out = buffers.out;
  forward.out_acc = partial ? static_cast<float*>(buffers.out) : nullptr;
  forward.lse = buffers.lse != nullptr ? buffers.lse : floats(workspace.lse);
  forward.sinks = partial ? nullptr : buffers.sinks;
  forward.initial = 1;
  forward.final = partial ? 0 : 1;
  forward.head_pack = head_pack;
  forward.tile_rows = tile_rows;
  forward.partial_out = floats(workspace.partial_out);
  forward.partial_lse = floats(workspace.partial_lse);
  return forward;
}

SplitParams SplitParamsOf(const PagedProblem& problem, const Buffers& buffers,
                          const Workspace& workspace, const SplitShape& split) {
  SplitParams params;
  params.rule.mask = MaskRuleOf(problem);
  params.rule.max_q = split.max_q;
  params.rule.unit_queries = split.unit_queries;
  params.max_columns = split.max_columns;
  params.packs = split.packs;
  char* const scratch = static_cast<char*>(buffers.workspace);
  params.tickets = reinterpret_cast<uint32_t*>(scratch + workspace.tickets);
  params.group_tickets = reinterpret_cast<uint32_t*>(scratch + workspace.group_tickets);
  return params;
}

AppendLaunch::AppendLaunch(const PagedProblem& problem, const Buffers& buffers) {
  const CacheShape& shape = problem.shape;
  const int64_t element = ElementBytes(shape.dtype);
  AppendParams& append = params_.append;
  append.step = StepParamsOf(problem, buffers);
  append.cache = static_cast<char*>(buffers.cache);
  append.k = static_cast<const char*>(buffers.k);
  append.v = static_cast<const char*>(buffers.v);
  append.k_plane_bytes = shape.k_plane_bytes();
  append.v_plane_bytes = shape.v_plane_bytes();
  append.k_token_bytes = static_cast<int32_t>(shape.num_kv_heads * shape.head_dim * element);
  append.v_token_bytes = static_cast<int32_t>(shape.num_kv_heads * shape.head_dim_v * element);
  append.k_row_bytes = shape.k_row_bytes();
  append.v_row_bytes = shape.v_row_bytes();
  params_.source = static_cast<const char*>(buffers.fetched.source);
  params_.target = static_cast<char*>(buffers.fetched.target);
  params_.bytes = static_cast<int32_t>(buffers.fetched.bytes);
  const int64_t bits =
      append.k_token_bytes | append.v_token_bytes | append.k_row_bytes | append.v_row_bytes;
  const int access_bytes = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
  kernel_ = fetches() ? FetchKernel(access_bytes) : AppendKernel(access_bytes);
  slices_ = std::min(problem.batch.max_append_tokens,
                     std::max(1, kAppendBlocksPerMultiprocessor * problem.device.sm_count /
                                     problem.batch.max_rows));
}

absl::Status AppendLaunch::Load() const { return LoadKernel({kernel_, 0}); }

absl::Status AppendLaunch::Launch(cudaStream_t stream, bool appends) const {
  if (!launches(appends)) return absl::OkStatus();
  FetchParams fetch = params_;
  fetch.appends = appends && slices_ > 0;
  void* arguments[] = {fetches() ? static_cast<void*>(&fetch) : &fetch.append};
  const dim3 grid = fetches() ? dim3(1) : dim3(slices_, fetch.append.step.max_rows);
  const dim3 threads(fetches() ? kFetchThreads : kAppendThreads);
  return ToStatus(cudaLaunchKernel(kernel_, grid, threads, arguments, 0, stream),
                  "launch of the paged append");
}

absl::Status KernelLaunch::Load() const { return LoadKernel({kernel, shared_bytes}); }

absl::Status KernelLaunch::Launch(const void* params, bool overlap, cudaStream_t stream) const {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  void* arguments[] = {const_cast<void*>(params)};
  return ToStatus(cudaLaunchKernelExC(&config, kernel, arguments), "launch of paged attention");
}

}  // namespace ringattn::worker::cuda::paged
