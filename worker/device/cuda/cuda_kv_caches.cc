#include "worker/device/cuda/cuda_kv_caches.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "worker/device/cuda/cuda_kv_scratch.h"
#include "worker/device/cuda/cuda_status.h"
#include "worker/device/cuda/tables/kv_batch_class.h"
#include "worker/device/cuda/tables/kv_group_rows.h"
#include "worker/kernels/cuda/paged/paged_attention.h"

namespace ringattn::worker {
namespace {

using cuda::paged::AttentionOptions;
using cuda::paged::BatchClass;
using cuda::paged::Buffers;
using cuda::paged::CacheShape;
using cuda::paged::PagedAttention;
using cuda::paged::PagedRow;
using cuda::paged::PagedStep;

// Table elements of one step and group, at least; the maximum is also four times the blocks.
constexpr int64_t kTableElements = int64_t{1} << 18;
// Graphs of one cache. The cache discards all of them when there would be more.
constexpr size_t kMaxGraphs = 128;
constexpr int64_t kZeroBytes = kGiB;  // between two looks at `stop`

// Planes of equal rows. They lie one after another, K before V.
struct Segment {
  int64_t first_plane = 0;
  int64_t planes = 0;
  DeviceKvShape::Plane row;
  std::unique_ptr<DeviceBuffer> memory;
  CacheShape shape;  // with rows of full width, for sizes

  char* k(int64_t plane) const {
    return static_cast<char*>(memory->data()) + (plane - first_plane) * shape.plane_bytes();
  }
  char* v(int64_t plane) const { return k(plane) + shape.k_plane_bytes(); }
};

// A captured launch of one batch class.
struct ClassGraph {
  explicit ClassGraph(const KvCallLayout& l) : layout(l) {}
  ~ClassGraph() {
    if (executable != nullptr) (void)cudaGraphExecDestroy(executable);
  }
  ClassGraph(const ClassGraph&) = delete;
  ClassGraph& operator=(const ClassGraph&) = delete;

  const KvCallLayout layout;
  cudaGraphExec_t executable = nullptr;
  int64_t zeroed_bytes = 0;
  bool signals_done = false;
};

class CudaKvCache final : public DeviceKvCache {
 public:
  // `inline_bytes`: see kInlineTableBytes.
  CudaKvCache(std::shared_ptr<CudaKvScratch> scratch, const cuda::DeviceInfo& info,
              DeviceKvShape shape, int64_t inline_bytes)
      : scratch_(std::move(scratch)),
        info_(info),
        shape_(std::move(shape)),
        inline_bytes_(inline_bytes) {}

  ~CudaKvCache() override {
    // A cache that was never used is destroyed by another thread than the engine's, which may be
    // capturing on the stream.
    if (!used_) return;
    (void)scratch_->events()->UseDevice();
    (void)cudaStreamSynchronize(scratch_->stream());
    ForgetGraphs();
  }

  absl::Status Init(Device* device) {
    for (size_t p = 0; p < shape_.planes.size(); ++p) {
      if (segments_.empty() || segments_.back().row != shape_.planes[p]) {
        Segment& segment = segments_.emplace_back();
        segment.first_plane = static_cast<int64_t>(p);
        segment.row = shape_.planes[p];
      }
      ++segments_.back().planes;
    }
    if (absl::Status status = CheckSizes(); !status.ok()) return status;
    for (Segment& segment : segments_) {
      segment.shape = FullShape(segment);
      auto memory = device->Allocate(segment.shape.bytes());
      if (!memory.ok()) return memory.status();
      segment.memory = *std::move(memory);
      bytes_ += segment.memory->bytes();
    }
    for (size_t g = 0; g < shape_.groups.size(); ++g) {
      GroupState& state = groups_.emplace_back(MaxTableElements());
      auto tables = device->Allocate(kMaxKvRows * kPagedRowBytes + MaxTableElements() * 4);
      if (!tables.ok()) return tables.status();
      state.tables = *std::move(tables);
      bytes_ += state.tables->bytes();
    }
    return CheckKernels();
  }

  int64_t bytes() const override { return bytes_; }

  absl::Status Zero(const std::atomic<bool>& stop) override {
    if (absl::Status status = scratch_->events()->UseDevice(); !status.ok()) return status;
    cudaStream_t stream = nullptr;  // the engine's thread uses the other one meanwhile
    absl::Status status = CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                     "cudaStreamCreateWithFlags");
    if (!status.ok()) return status;
    for (const Segment& segment : segments_) {
      char* const data = static_cast<char*>(segment.memory->data());
      for (int64_t at = 0; status.ok() && at < segment.memory->bytes(); at += kZeroBytes) {
        if (stop.load(std::memory_order_relaxed)) {
          status = absl::CancelledError("the cache is being freed");
          break;
        }
        status =
            CudaStatus(cudaMemsetAsync(data + at, 0,
                                       std::min(kZeroBytes, segment.memory->bytes() - at), stream),
                       "cudaMemsetAsync of a K/V cache");
        if (status.ok()) {
          status = CudaStatus(cudaStreamSynchronize(stream), "cudaMemsetAsync of a K/V cache");
        }
      }
    }
    (void)cudaStreamDestroy(stream);
    return status;
  }

  absl::Status CopyBlock(int group, uint32_t source, uint32_t target, int64_t entries) override {
    used_ = true;
    if (absl::Status status = scratch_->events()->UseDevice(); !status.ok()) return status;
    const auto copy = [&](char* plane, int64_t row_bytes) {
      const int64_t block_bytes = shape_.block_tokens * row_bytes;
      return CudaStatus(
          cudaMemcpyAsync(plane + target * block_bytes, plane + source * block_bytes,
                          entries * row_bytes, cudaMemcpyDeviceToDevice, scratch_->stream()),
          "copy on write of a K/V cache");
    };
    for (const Segment& segment : segments_) {
      const int64_t end =
          std::min(segment.first_plane + segment.planes, shape_.groups[group].layers);
      for (int64_t plane = segment.first_plane; plane < end; ++plane) {
        absl::Status status = copy(segment.k(plane), segment.shape.k_row_bytes());
        if (status.ok()) status = copy(segment.v(plane), segment.shape.v_row_bytes());
        if (!status.ok()) return scratch_->Check(std::move(status));
      }
    }
    return absl::OkStatus();
  }

  absl::Status SetRows(int group, absl::Span<const DeviceKvRow> rows) override {
    used_ = true;
    if (absl::Status status = scratch_->events()->UseDevice(); !status.ok()) return status;
    return groups_[group].Set(rows, inline_bytes_);
  }

  absl::Status Run(const DeviceKvCall& call) override {
    if (absl::Status status = scratch_->events()->UseDevice(); !status.ok()) return status;
    GroupState& state = groups_[call.group];
    const bool appends = !call.k.empty() || !call.v.empty();
    if (state.total_q == 0 && !appends) return absl::OkStatus();
    KvBatchClass key;
    key.group = call.group;
    while (call.plane >= segments_[key.segment].first_plane + segments_[key.segment].planes) {
      ++key.segment;
    }
    key.rows = state.rows;
    if (state.total_q > 0) {
      key.max_q = KvClassSize(state.max_q);
      key.total_q = KvClassSize(state.total_q);
    }
    if (appends) {
      key.max_append = KvClassSize(state.max_append);
      key.total_append = KvClassSize(state.total_append);
    }
    key.partial = call.partial;
    key.resident = state.resident();
    key.table_bytes = state.resident() ? KvTableClass(state.rows, 0) : state.table_bytes;
    if (!KvCallLayout(key, shape_.groups[key.group], shape_.dtype).small()) {
      key.table_bytes = 0;
      key.resident = false;  // the same launch for all tables
    }
    if (absl::Status uploaded = Upload(state, /*rows=*/key.table_bytes == 0); !uploaded.ok()) {
      return scratch_->Check(std::move(uploaded));
    }
    absl::StatusOr<const ClassGraph*> graph = GraphOf(key);
    if (!graph.ok()) return scratch_->Check(graph.status());
    absl::Status status = (*graph)->layout.small() ? EnqueueSmall(call, state, key, **graph)
                                                   : EnqueueLarge(call, state, **graph);
    // Also after an error: scratch memory and the tensors must not be in use when this returns.
    const bool signals = status.ok() && (*graph)->signals_done;
    absl::Status waited = signals ? scratch_->WaitForSignal() : scratch_->Wait();
    if (status.ok()) status = std::move(waited);
    if (!status.ok()) {
      scratch_->counters_are_zero = false;
      return scratch_->Check(std::move(status));
    }
    if ((*graph)->layout.small()) TakeSmallResults(call, state, (*graph)->layout);
    return absl::OkStatus();
  }

 private:
  struct GroupState : KvGroupRows {
    explicit GroupState(int64_t max_elements) : KvGroupRows(max_elements) {}

    // [kMaxKvRows] PagedRow, of which the last `rows` are used, and the table elements after them.
    // Written for steps whose rows or tables do not travel with the calls.
    std::unique_ptr<DeviceBuffer> tables;

    char* first_row() const { return first_element() - rows * kPagedRowBytes; }
    char* first_element() const {
      return static_cast<char*>(tables->data()) + kMaxKvRows * kPagedRowBytes;
    }
  };

  int64_t MaxTableElements() const { return std::max(kTableElements, 4 * shape_.blocks); }

  CacheShape FullShape(const Segment& segment) const {
    CacheShape shape;
    shape.dtype = shape_.dtype;
    shape.block_tokens = static_cast<int32_t>(shape_.block_tokens);
    shape.blocks = shape_.blocks;
    shape.planes = static_cast<int32_t>(segment.planes);
    shape.k_row_elements = static_cast<int32_t>(segment.row.k_elements);
    shape.v_row_elements = static_cast<int32_t>(segment.row.v_elements);
    shape.position_parts = static_cast<int32_t>(shape_.position_parts);
    shape.position_part = static_cast<int32_t>(shape_.position_part);
    return shape;
  }
  CacheShape ShapeOf(const DeviceKvGroup& group, const Segment& segment) const {
    CacheShape shape = segment.shape;
    shape.num_kv_heads = static_cast<int32_t>(group.num_kv_heads);
    shape.head_dim = static_cast<int32_t>(group.head_dim);
    shape.head_dim_v = static_cast<int32_t>(group.head_dim_v);
    return shape;
  }
  static AttentionOptions OptionsOf(const DeviceKvGroup& group, bool partial) {
    AttentionOptions options;
    options.num_heads = static_cast<int32_t>(group.num_heads);
    options.softmax_scale = group.softmax_scale;
    options.softcap = group.softcap;
    // A window as long as the longest sequence hides nothing.
    options.window_left =
        group.window_left >= kMaxKvEntries ? -1 : static_cast<int32_t>(group.window_left);
    options.causal = group.causal;
    options.partial = partial;
    return options;
  }

  // Checks the limits on which the 32-bit sizes below depend.
  absl::Status CheckSizes() const {
    if (shape_.blocks * shape_.block_tokens > INT32_MAX) {
      return absl::UnimplementedError(
          absl::StrCat("spec.blocks is ", shape_.blocks, " of ", shape_.block_tokens,
                       " tokens; the maximum on a GPU is ", INT32_MAX, " tokens per plane"));
    }
    for (const DeviceKvShape::Plane& plane : shape_.planes) {
      const int64_t widest = std::max(plane.k_elements, plane.v_elements);
      if (widest <= (int64_t{1} << 24)) continue;
      return absl::UnimplementedError(absl::StrCat("a row of K or V has ", widest,
                                                   " elements; the maximum on a GPU is 16777216"));
    }
    return absl::OkStatus();
  }

  // UNIMPLEMENTED if no kernel serves a group. Loads the kernels.
  absl::Status CheckKernels() {
    for (size_t g = 0; g < shape_.groups.size(); ++g) {
      for (size_t s = 0; s < segments_.size(); ++s) {
        if (segments_[s].first_plane >= shape_.groups[g].layers) continue;
        for (const bool partial : {false, true}) {
          if (shape_.position_parts > 1 && !partial) continue;
          KvBatchClass key;
          key.group = static_cast<int>(g);
          key.segment = static_cast<int64_t>(s);
          key.rows = key.max_append = key.total_append = 1;
          key.max_q = key.total_q = 2 * cuda::paged::kMaxDecodeQueries;
          key.partial = partial;
          const KvCallLayout layout(key, shape_.groups[g], shape_.dtype);
          auto attention = Create(key, layout);
          if (absl::IsInvalidArgument(attention.status())) {
            return absl::UnimplementedError(
                absl::StrCat("spec.groups[", g, "]: ", attention.status().message()));
          }
          if (!attention.ok()) return attention.status();
        }
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<PagedAttention>> Create(const KvBatchClass& key,
                                                         const KvCallLayout& layout) const {
    const DeviceKvGroup& group = shape_.groups[key.group];
    const Segment& segment = segments_[key.segment];
    const CacheShape shape = ShapeOf(group, segment);
    const AttentionOptions options = OptionsOf(group, key.partial);
    BatchClass batch;
    batch.max_rows = static_cast<int32_t>(key.rows);
    batch.max_q_tokens = static_cast<int32_t>(std::max<int64_t>(key.max_q, 1));
    batch.max_total_q = static_cast<int32_t>(std::max<int64_t>(key.total_q, 1));
    batch.max_append_tokens = static_cast<int32_t>(key.max_append);
    batch.counter_bytes = CudaKvScratch::kCounterBytes;
    Buffers buffers;
    buffers.cache = segment.memory->data();
    char* const input = scratch_->input();
    char* const output = layout.small() ? scratch_->pinned_output : scratch_->output();
    buffers.step = reinterpret_cast<const PagedStep*>(input);
    const char* const held = groups_[key.group].first_element();
    const char* const sent = input + layout.tables;
    buffers.rows = reinterpret_cast<const PagedRow*>((key.table_bytes > 0 ? sent : held) -
                                                     key.rows * kPagedRowBytes);
    buffers.tables =
        reinterpret_cast<const int32_t*>(key.table_bytes > 0 && !key.resident ? sent : held);
    buffers.q = input + layout.q;
    buffers.k = input + layout.k;
    buffers.v = input + layout.v;
    buffers.out = output + layout.out;
    buffers.lse = reinterpret_cast<float*>(output + layout.lse);
    if (!group.sinks.empty()) buffers.sinks = reinterpret_cast<const float*>(input + layout.sinks);
    if (layout.fetched()) buffers.fetched = {scratch_->pinned_input, input, layout.input_bytes};
    if (layout.small()) buffers.done = scratch_->done_word();
    buffers.workspace = scratch_->workspace();
    const int64_t workspace = PagedAttention::WorkspaceBytes(shape, options, batch, info_);
    if (workspace > CudaKvScratch::kWorkspaceBytes) {
      return KvCallTooLarge("bytes of partial results", workspace, CudaKvScratch::kWorkspaceBytes);
    }
    return PagedAttention::Create(shape, options, batch, buffers, info_);
  }

  absl::StatusOr<const ClassGraph*> GraphOf(const KvBatchClass& key) {
    if (const auto found = graphs_.find(key); found != graphs_.end()) return found->second.get();
    const KvCallLayout layout(key, shape_.groups[key.group], shape_.dtype);
    if (layout.input_bytes > CudaKvScratch::kInputBytes) {
      return KvCallTooLarge("bytes of q, k and v", layout.input_bytes, CudaKvScratch::kInputBytes);
    }
    if (layout.output_bytes > CudaKvScratch::kOutputBytes) {
      return KvCallTooLarge("bytes of results", layout.output_bytes, CudaKvScratch::kOutputBytes);
    }
    auto attention = Create(key, layout);
    if (!attention.ok()) return attention.status();
    auto graph = std::make_unique<ClassGraph>(layout);
    if (absl::Status s = Capture(**attention, key, graph.get()); !s.ok()) return s;
    if (graphs_.size() >= kMaxGraphs) {
      if (absl::Status status = scratch_->Wait(); !status.ok()) return status;
      ForgetGraphs();
    }
    return graphs_.emplace(key, std::move(graph)).first->second.get();
  }

  absl::Status Capture(const PagedAttention& attention, const KvBatchClass& key,
                       ClassGraph* target) {
    const cudaStream_t stream = scratch_->stream();
    absl::Status status = CudaStatus(
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    if (!status.ok()) return status;
    status = key.total_q == 0      ? attention.EnqueueAppend(stream)
             : key.max_append == 0 ? attention.EnqueueRead(stream)
                                   : attention.Enqueue(stream);
    cudaGraph_t graph = nullptr;
    status.Update(CudaStatus(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture"));
    if (status.ok()) {
      status =
          CudaStatus(cudaGraphInstantiate(&target->executable, graph, 0), "cudaGraphInstantiate");
    }
    if (status.ok()) {
      status = CudaStatus(cudaGraphUpload(target->executable, stream), "cudaGraphUpload");
    }
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    target->zeroed_bytes = attention.zeroed_bytes();
    target->signals_done = key.total_q > 0 && attention.signals_done();
    return status;
  }

  // REQUIRES: the stream is idle.
  void ForgetGraphs() { graphs_.clear(); }

  // Copies what the device lacks of the step: changes of resident tables, and with `rows` also what
  // a small call carries itself.
  absl::Status Upload(GroupState& state, bool rows) {
    KvResidentTables& resident = state.resident_tables;
    if (state.resident()) {
      for (const KvResidentTables::Run& run : resident.changes()) {
        absl::Status status = CopyTables(state.first_element() + run.first * 4,
                                         resident.elements() + run.first, run.count * 4);
        if (!status.ok()) return status;
      }
      resident.NoteCopied();
    }
    if (!rows || state.uploaded) return absl::OkStatus();
    if (!state.resident()) resident.Forget();
    absl::Status status = CopyTables(state.first_row(), state.staging.data(),
                                     static_cast<int64_t>(state.staging.size()));
    state.uploaded = status.ok();
    return status;
  }

  absl::Status CopyTables(char* target, const void* source, int64_t bytes) {
    if (bytes <= CudaKvScratch::kPinnedTableBytes) {
      if (scratch_->pinned_table_bytes + bytes > CudaKvScratch::kPinnedTableBytes) {
        if (absl::Status status = scratch_->Wait(); !status.ok()) return status;
      }
      char* const pinned = scratch_->pinned_tables + scratch_->pinned_table_bytes;
      std::memcpy(pinned, source, bytes);
      source = pinned;
      scratch_->pinned_table_bytes += bytes;
    }
    return CudaStatus(
        cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, scratch_->stream()),
        "cudaMemcpyAsync of a step's rows");
  }

  // Writes the PagedStep and the plane's sinks to pinned memory.
  void WriteHeader(const DeviceKvCall& call, const KvCallLayout& layout) {
    PagedStep step;
    step.num_rows = static_cast<int32_t>(groups_[call.group].num_rows);
    step.number = scratch_->NextNumber();
    for (const Segment& segment : segments_) {
      if (call.plane >= segment.first_plane) {
        step.plane = static_cast<int32_t>(call.plane - segment.first_plane);
      }
    }
    std::memcpy(scratch_->pinned_input, &step, sizeof(step));
    const DeviceKvGroup& group = shape_.groups[call.group];
    if (group.sinks.empty()) return;
    std::memcpy(scratch_->pinned_input + layout.sinks,
                group.sinks.data() + call.plane * group.num_heads, group.num_heads * 4);
  }

  absl::Status CopyIn(int64_t offset, const char* source, int64_t bytes) {
    if (bytes == 0) return absl::OkStatus();
    return CudaStatus(cudaMemcpyAsync(scratch_->input() + offset, source, bytes,
                                      cudaMemcpyHostToDevice, scratch_->stream()),
                      "cudaMemcpyAsync of a call's tensors");
  }

  absl::Status Replay(const ClassGraph& graph) {
    if (!scratch_->counters_are_zero || graph.zeroed_bytes > CudaKvScratch::kCounterBytes) {
      const int64_t bytes = std::max(graph.zeroed_bytes, CudaKvScratch::kCounterBytes);
      absl::Status status =
          CudaStatus(cudaMemsetAsync(scratch_->workspace(), 0, bytes, scratch_->stream()),
                     "cudaMemsetAsync of the workspace");
      if (!status.ok()) return status;
    }
    scratch_->counters_are_zero = true;
    return CudaStatus(cudaGraphLaunch(graph.executable, scratch_->stream()), "cudaGraphLaunch");
  }

  absl::Status EnqueueSmall(const DeviceKvCall& call, const GroupState& state,
                            const KvBatchClass& key, const ClassGraph& graph) {
    const KvCallLayout& layout = graph.layout;
    WriteHeader(call, layout);
    char* const input = scratch_->pinned_input;
    if (key.table_bytes > 0) {
      std::memcpy(input + layout.rows, state.staging.data(), state.staging.size());
    }
    int64_t end = layout.q;
    for (const auto& [offset, tensor] :
         {std::pair(layout.q, call.q), std::pair(layout.k, call.k), std::pair(layout.v, call.v)}) {
      if (tensor.empty()) continue;
      std::memcpy(input + offset, tensor.data(), tensor.size());
      end = offset + static_cast<int64_t>(tensor.size());
    }
    if (layout.fetched()) return Replay(graph);
    absl::Status status = CopyIn(0, input, end);
    return status.ok() ? Replay(graph) : status;
  }

  void TakeSmallResults(const DeviceKvCall& call, const GroupState& state,
                        const KvCallLayout& layout) {
    if (!call.out.empty()) {
      std::memcpy(call.out.data(), scratch_->pinned_output + layout.out, call.out.size());
    }
    if (call.lse.empty()) return;
    const int64_t row = state.total_q * 4;
    for (int64_t head = 0; head < shape_.groups[call.group].num_heads; ++head) {
      std::memcpy(call.lse.data() + head * row,
                  scratch_->pinned_output + layout.lse + head * LseStride(state), row);
    }
  }

  absl::Status EnqueueLarge(const DeviceKvCall& call, const GroupState& state,
                            const ClassGraph& graph) {
    const KvCallLayout& layout = graph.layout;
    WriteHeader(call, layout);
    absl::Status status = CopyIn(0, scratch_->pinned_input, layout.q);
    for (const auto& [offset, tensor] :
         {std::pair(layout.q, call.q), std::pair(layout.k, call.k), std::pair(layout.v, call.v)}) {
      if (status.ok()) {
        status = CopyIn(offset, tensor.data(), static_cast<int64_t>(tensor.size()));
      }
    }
    if (status.ok()) status = Replay(graph);
    if (status.ok() && !call.out.empty()) {
      status =
          CudaStatus(cudaMemcpyAsync(call.out.data(), scratch_->output() + layout.out,
                                     call.out.size(), cudaMemcpyDeviceToHost, scratch_->stream()),
                     "cudaMemcpyAsync of out");
    }
    if (status.ok() && !call.lse.empty()) {
      const int64_t row = state.total_q * 4;
      status =
          CudaStatus(cudaMemcpy2DAsync(call.lse.data(), row, scratch_->output() + layout.lse,
                                       LseStride(state), row, shape_.groups[call.group].num_heads,
                                       cudaMemcpyDeviceToHost, scratch_->stream()),
                     "cudaMemcpy2DAsync of lse");
    }
    return status;
  }

  static int64_t LseStride(const GroupState& state) { return KvClassSize(state.total_q) * 4; }

  const std::shared_ptr<CudaKvScratch> scratch_;
  const cuda::DeviceInfo info_;
  const DeviceKvShape shape_;
  const int64_t inline_bytes_;
  int64_t bytes_ = 0;
  bool used_ = false;              // the stream may have work of the cache
  std::vector<Segment> segments_;  // in the order of their planes
  std::vector<GroupState> groups_;
  std::map<KvBatchClass, std::unique_ptr<ClassGraph>> graphs_;
};

class CudaKvCaches final : public DeviceKvCaches {
 public:
  CudaKvCaches(CudaEventPool* events, Device* device, const cuda::DeviceInfo& info,
               int64_t inline_bytes)
      : events_(events), device_(device), info_(info), inline_bytes_(inline_bytes) {}

  int64_t scratch_bytes() const override { return CudaKvScratch::kTotalBytes; }

  absl::StatusOr<std::unique_ptr<DeviceKvCache>> Make(const DeviceKvShape& shape) override {
    absl::StatusOr<std::shared_ptr<CudaKvScratch>> scratch = GetScratch();
    if (!scratch.ok()) return scratch.status();
    auto cache = std::make_unique<CudaKvCache>(*std::move(scratch), info_, shape, inline_bytes_);
    if (absl::Status status = cache->Init(device_); !status.ok()) return status;
    return cache;
  }

 private:
  // Made for the first cache: most workers have none.
  absl::StatusOr<std::shared_ptr<CudaKvScratch>> GetScratch() {
    absl::MutexLock lock(&mutex_);
    if (scratch_ == nullptr) {
      auto scratch = std::make_shared<CudaKvScratch>(events_);
      if (absl::Status status = scratch->Init(device_); !status.ok()) return status;
      scratch_ = std::move(scratch);
    }
    if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
    return scratch_;
  }

  CudaEventPool* const events_;
  Device* const device_;
  const cuda::DeviceInfo info_;
  const int64_t inline_bytes_;
  absl::Mutex mutex_;
  std::shared_ptr<CudaKvScratch> scratch_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<DeviceKvCaches> MakeCudaKvCaches(CudaEventPool* events, Device* device,
                                                 const cuda::DeviceInfo& info) {
  return std::make_unique<CudaKvCaches>(events, device, info, kInlineTableBytes);
}

std::unique_ptr<DeviceKvCaches> MakeResidentCudaKvCaches(CudaEventPool* events, Device* device,
                                                         const cuda::DeviceInfo& info) {
  return std::make_unique<CudaKvCaches>(events, device, info, /*inline_bytes=*/0);
}

}  // namespace ringattn::worker
