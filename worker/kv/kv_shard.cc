#include "worker/kv/kv_shard.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/attention/band.h"
#include "common/base/monotonic_time.h"
#include "common/kv/kv_error.h"
#include "common/kv/shard_cut.h"
#include "common/wire/durations.h"

namespace ringattn::worker {
namespace {

// Between two looks at `stop` while memory is zeroed: some milliseconds.
constexpr int64_t kZeroBytes = 16 * kMiB;

bool ZeroBuffer(DeviceBuffer* buffer, const std::atomic<bool>& stop) {
  char* const data = static_cast<char*>(buffer->data());
  for (int64_t at = 0; at < buffer->bytes(); at += kZeroBytes) {
    if (stop.load(std::memory_order_relaxed)) return false;
    std::memset(data + at, 0, std::min(kZeroBytes, buffer->bytes() - at));
  }
  return true;
}

bool IsOutput(v1::KvOutput output) {
  switch (output) {
    case v1::KV_OUTPUT_UNSPECIFIED:
    case v1::KV_OUTPUT_OUT:
    case v1::KV_OUTPUT_OUT_AND_LSE:
    case v1::KV_OUTPUT_PARTIAL:
    case v1::KV_OUTPUT_NONE:
      return true;
    default:
      return false;
  }
}

absl::Status BadCall(absl::string_view message) {
  return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL", message);
}

}  // namespace

KvShard::KvShard(KvCacheSpec spec, KvPlacement placement, int rank)
    : spec_(std::move(spec)),
      placement_(placement),
      rank_(rank),
      log_(spec_, placement),
      plans_(spec_.groups.size()) {}

absl::StatusOr<std::unique_ptr<KvShard>> KvShard::Make(KvCacheSpec spec, KvPlacement placement,
                                                       int rank, Device* device) {
  std::unique_ptr<KvShard> shard(new KvShard(std::move(spec), placement, rank));
  if (DeviceKvCaches* const caches = device->kv_caches()) {
    auto cache = caches->Make(shard->DeviceShape());
    if (!cache.ok()) return cache.status();
    shard->device_cache_ = *std::move(cache);
    shard->bytes_ = shard->device_cache_->bytes();
    return shard;
  }
  const int64_t element = ElementBytes(shard->spec_.dtype);
  const int64_t rows = shard->spec_.blocks * shard->spec_.block_tokens;
  for (int p = 0; p < shard->spec_.planes(); ++p) {
    const KvPlaneShape shape = PlaneShapeOfRank(shard->spec_, placement, p);
    Plane plane;
    plane.k_row_bytes = shape.k_elements * element;
    plane.v_row_bytes = shape.v_elements * element;
    auto k = device->Allocate(rows * plane.k_row_bytes);
    if (!k.ok()) return k.status();
    auto v = device->Allocate(rows * plane.v_row_bytes);
    if (!v.ok()) return v.status();
    plane.k = *std::move(k);
    plane.v = *std::move(v);
    shard->bytes_ += plane.k->bytes() + plane.v->bytes();
    shard->planes_.push_back(std::move(plane));
  }
  return shard;
}

bool KvShard::Zero(const std::atomic<bool>& stop) {
  if (device_cache_ != nullptr) {
    const absl::Status status = device_cache_->Zero(stop);
    if (!status.ok() && !absl::IsCancelled(status)) (void)CheckDevice(status);
    return status.ok();
  }
  for (const Plane& plane : planes_) {
    if (!ZeroBuffer(plane.k.get(), stop) || !ZeroBuffer(plane.v.get(), stop)) return false;
  }
  return true;
}

absl::Status KvShard::Begin(uint64_t epoch, const v1::StepBegin& begin,
                            v1::StepResponse* response) {
  if (!lost_.ok()) return lost_;
  absl::StatusOr<KvStep> step = ParseStep(begin, limits_);
  if (!step.ok()) return step.status();
  absl::StatusOr<KvStepLog::Begun> begun = log_.Begin(epoch, *step);
  if (!begun.ok()) return begun.status();
  if (!begun->refusals.empty()) {
    *response->mutable_refused() = ToProto(step->number, begun->refusals);
    return absl::OkStatus();
  }
  if (!begun->repeated) {
    ForgetPlans();
    own_appends_ = AppendTokensOfRank(spec_, placement_, *step, rank_);
    for (const KvBlockCopy& copy : log_.blocks().copies()) CopyOnWrite(copy);
    if (!lost_.ok()) return lost_;
  }
  v1::StepAccepted* accepted = response->mutable_accepted();
  accepted->set_step(step->number);
  accepted->set_tables_crc32c(log_.blocks().tables_crc32c());
  accepted->set_blocks_free(static_cast<uint64_t>(log_.blocks().blocks_free()));
  return absl::OkStatus();
}

absl::Status KvShard::Call(uint64_t epoch, const v1::LayerCall& call, StepKernels* kernels,
                           const std::atomic<bool>& stop, v1::LayerResult* result) {
  if (!lost_.ok()) return lost_;
  const bool sends_kv = !call.k().empty() || !call.v().empty();
  const bool appends = sends_kv || own_appends_ == 0;
  if (auto status = log_.StartCall(epoch, call.step(), call.layer(), appends); !status.ok()) {
    return status;
  }
  const KvLayerLocation location = *FindLayer(spec_, call.layer());
  const auto compute = [&]() -> absl::Status {
    if (!IsOutput(call.output())) {
      return BadCall(absl::StrCat("call.output is ", static_cast<int>(call.output()),
                                  "; use a value of KvOutput"));
    }
    const KvStep& step = *log_.begun_step();
    if (call.output() == v1::KV_OUTPUT_NONE && step.q_tokens() != 0) {
      return BadCall(absl::StrCat("call.output is KV_OUTPUT_NONE; the step's rows have ",
                                  step.q_tokens(), " queries"));
    }
    if (placement_.position_parts > 1 && call.output() != v1::KV_OUTPUT_PARTIAL &&
        call.output() != v1::KV_OUTPUT_NONE) {
      return BadCall("call.output must be KV_OUTPUT_PARTIAL: the cache has several position parts");
    }
    const KvCallBytes bytes =
        CallBytesOfRank(spec_, placement_, step, location.group, call.output(), rank_);
    if (auto status = CheckCallBytes(call, bytes); !status.ok()) return status;
    result->set_step(call.step());
    result->set_layer(call.layer());
    result->mutable_out()->resize(bytes.out);
    result->mutable_lse()->resize(bytes.lse);
    if (device_cache_ != nullptr) return RunOnDevice(location, call, stop, result);
    GroupPlan& plan = PlanOf(location.group);
    if (sends_kv) AppendRows(location.group, location.plane, plan, call);
    if (step.q_tokens() == 0) return absl::OkStatus();
    return Attend(location, &plan, call, kernels, stop, result);
  };
  const absl::Time begin = MonotonicNow();
  absl::Status status = compute();
  SetDuration(MonotonicNow() - begin, result->mutable_device_time());
  log_.FinishCall(call.layer(), appends && status.ok());
  return status;
}

// ------------------------------------------------------------------------------------ memory

int64_t KvShard::KRowBytes(int group) const {
  const KvHeadRange heads = HeadsOfGroup(group);
  return (heads.kv_end - heads.kv_begin) * spec_.groups[group].head_dim * ElementBytes(spec_.dtype);
}

int64_t KvShard::VRowBytes(int group) const {
  const KvHeadRange heads = HeadsOfGroup(group);
  return (heads.kv_end - heads.kv_begin) * spec_.groups[group].head_dim_v *
         ElementBytes(spec_.dtype);
}

bool KvShard::IsFlat(int group, int plane) const {
  return planes_[plane].k_row_bytes == KRowBytes(group) &&
         planes_[plane].v_row_bytes == VRowBytes(group);
}

void KvShard::CopyOnWrite(const KvBlockCopy& copy) {
  const int64_t count = std::clamp<int64_t>(copy.entries - position_part() * spec_.block_tokens, 0,
                                            spec_.block_tokens);
  if (device_cache_ != nullptr) {
    if (lost_.ok() && count > 0) {
      (void)CheckDevice(device_cache_->CopyBlock(copy.group, copy.source, copy.target, count));
    }
    return;
  }
  const size_t layers = spec_.groups[copy.group].layers.size();
  for (size_t p = 0; p < layers; ++p) {
    const auto copy_rows = [&](DeviceBuffer* buffer, int64_t plane_row, int64_t row) {
      char* const data = static_cast<char*>(buffer->data());
      std::memcpy(data + copy.target * spec_.block_tokens * plane_row,
                  data + copy.source * spec_.block_tokens * plane_row, count * row);
    };
    copy_rows(planes_[p].k.get(), planes_[p].k_row_bytes, KRowBytes(copy.group));
    copy_rows(planes_[p].v.get(), planes_[p].v_row_bytes, VRowBytes(copy.group));
  }
}

void KvShard::AppendRows(int group, int plane, const GroupPlan& plan, const v1::LayerCall& call) {
  const Plane& memory = planes_[plane];
  const auto copy_rows = [&](const Append& append, DeviceBuffer* buffer, int64_t plane_row,
                             int64_t row, const std::string& source) {
    std::memcpy(static_cast<char*>(buffer->data()) + append.block * spec_.block_tokens * plane_row +
                    append.offset * row,
                source.data() + append.source_row * row, append.count * row);
  };
  const int64_t k_row = KRowBytes(group), v_row = VRowBytes(group);
  for (const Append& append : plan.appends) {
    copy_rows(append, memory.k.get(), memory.k_row_bytes, k_row, call.k());
    copy_rows(append, memory.v.get(), memory.v_row_bytes, v_row, call.v());
  }
}

// ------------------------------------------------------------------------------------ device

DeviceKvShape KvShard::DeviceShape() const {
  DeviceKvShape shape;
  shape.dtype = spec_.dtype;
  shape.block_tokens = spec_.block_tokens;
  shape.blocks = spec_.blocks;
  shape.position_parts = placement_.position_parts;
  shape.position_part = position_part();
  for (int p = 0; p < spec_.planes(); ++p) {
    const KvPlaneShape plane = PlaneShapeOfRank(spec_, placement_, p);
    shape.planes.push_back({plane.k_elements, plane.v_elements});
  }
  for (size_t g = 0; g < spec_.groups.size(); ++g) {
    const KvLayerGroup& from = spec_.groups[g];
    const KvHeadRange heads = HeadsOfGroup(static_cast<int>(g));
    DeviceKvGroup group;
    group.layers = static_cast<int64_t>(from.layers.size());
    group.num_heads = heads.end - heads.begin;
    group.num_kv_heads = heads.kv_end - heads.kv_begin;
    group.head_dim = from.head_dim;
    group.head_dim_v = from.head_dim_v;
    group.softmax_scale = static_cast<float>(from.softmax_scale);
    group.softcap = static_cast<float>(from.softcap);
    group.window_left = from.window_left;
    group.causal = from.causal;
    for (int64_t layer = 0; !from.sinks.empty() && layer < group.layers; ++layer) {
      const auto row = from.sinks.begin() + layer * from.num_heads;
      group.sinks.insert(group.sinks.end(), row + heads.begin, row + heads.end);
    }
    shape.groups.push_back(std::move(group));
  }
  return shape;
}

absl::Status KvShard::CheckDevice(const absl::Status& status) {
  if (status.ok() || absl::IsResourceExhausted(status)) return status;
  lost_ = KvError(
      absl::StatusCode::kDataLoss, "KV_LOST",
      absl::StrCat("the cache is lost; create another one and prefill it: ", status.message()));
  return lost_;
}

absl::Status KvShard::RunOnDevice(const KvLayerLocation& location, const v1::LayerCall& call,
                                  const std::atomic<bool>& stop, v1::LayerResult* result) {
  if (stop.load(std::memory_order_relaxed))
    return absl::CancelledError("the cache's calls must end");
  GroupPlan& plan = plans_[location.group];
  if (!plan.ready) {
    const auto own_entries = [&](int64_t begin, int64_t end) {
      return EntriesOnPart(begin, end, spec_.block_tokens, placement_.position_parts,
                           position_part());
    };
    std::vector<DeviceKvRow> rows;
    for (const KvRowView& row : log_.blocks().rows()) {
      rows.push_back({own_entries(0, row.keep_length), own_entries(row.keep_length, row.end()),
                      row.q_tokens, row.end() - row.q_tokens, row.tables[location.group]});
    }
    if (auto s = CheckDevice(device_cache_->SetRows(location.group, rows)); !s.ok()) return s;
    plan.ready = true;
  }
  DeviceKvCall device_call;
  device_call.group = location.group;
  device_call.plane = location.plane;
  device_call.q = call.q();
  device_call.k = call.k();
  device_call.v = call.v();
  // With several parts, the other outputs belong to steps without queries.
  device_call.partial = call.output() == v1::KV_OUTPUT_PARTIAL || placement_.position_parts > 1;
  device_call.out = absl::MakeSpan(*result->mutable_out());
  device_call.lse = absl::MakeSpan(*result->mutable_lse());
  return CheckDevice(device_cache_->Run(device_call));
}

// ------------------------------------------------------------------------------------- plans

void KvShard::ForgetPlans() {
  for (GroupPlan& plan : plans_) plan.ready = plan.scattered_ready = false;
}

KvShard::GroupPlan& KvShard::PlanOf(int group) {
  GroupPlan& plan = plans_[group];
  if (plan.ready) return plan;
  plan = GroupPlan();
  PlanAppends(group, &plan);
  PlanAttention(group, &plan);
  plan.ready = true;
  return plan;
}

void KvShard::PlanAppends(int group, GroupPlan* plan) const {
  const int64_t per_entry = EntriesPerTableEntry(spec_, placement_);
  int64_t source_row = 0;
  for (const KvRowView& row : log_.blocks().rows()) {
    for (int64_t p = row.keep_length; p < row.end();) {
      const int64_t end = std::min(row.end(), (p / spec_.block_tokens + 1) * spec_.block_tokens);
      if (p / spec_.block_tokens % placement_.position_parts == position_part()) {
        plan->appends.push_back(
            {source_row, row.tables[group][p / per_entry], p % spec_.block_tokens, end - p});
        source_row += end - p;
      }
      p = end;
    }
  }
}

// Entries that the rows' queries see on this rank, block by block in ascending order.
template <typename Visit>
void KvShard::ForSeenRuns(int group, Visit visit) const {
  const int64_t per_entry = EntriesPerTableEntry(spec_, placement_);
  const int64_t part_begin = position_part() * spec_.block_tokens;
  const std::vector<KvRowView>& rows = log_.blocks().rows();
  for (size_t r = 0; r < rows.size(); ++r) {
    const KvRowView& row = rows[r];
    const int64_t begin = SeenBegin(spec_.groups[group], row.end(), row.q_tokens);
    for (int64_t entry = begin / per_entry; entry * per_entry < row.end(); ++entry) {
      const int64_t block_begin = entry * per_entry + part_begin;
      const int64_t from = std::max(begin, block_begin);
      const int64_t to = std::min(row.end(), block_begin + spec_.block_tokens);
      if (from >= to) continue;
      visit(SeenRun{static_cast<int64_t>(r), row.tables[group][entry], from - block_begin, from,
                    to - from});
    }
  }
}

void KvShard::PlanAttention(int group, GroupPlan* plan) const {
  const KvLayerGroup& spec = spec_.groups[group];
  const KvHeadRange heads = HeadsOfGroup(group);
  AttentionProblem& problem = plan->problem;
  problem.dtype = spec_.dtype;
  problem.num_heads = heads.end - heads.begin;
  problem.num_kv_heads = heads.kv_end - heads.kv_begin;
  problem.head_dim = spec.head_dim;
  problem.head_dim_v = spec.head_dim_v;
  problem.softmax_scale = static_cast<float>(spec.softmax_scale);
  problem.softcap = static_cast<float>(spec.softcap);

  ForwardCall call;
  call.problem = &problem;
  call.initial = call.final = true;
  const std::vector<KvRowView>& rows = log_.blocks().rows();
  for (size_t r = 0; r < rows.size(); ++r) {
    const KvRowView& row = rows[r];
    problem.bands.push_back(
        DocumentBand(MaskRule{spec.causal, spec.window_left, -1}, row.q_tokens, row.end()));
    if (row.q_tokens > 0) {
      call.q_pieces.push_back({call.q_rows, row.q_tokens, static_cast<int64_t>(r), 0, 1});
    }
    call.q_rows += row.q_tokens;
  }
  plan->scattered = call;
  KvBlock plane;
  plane.rows = spec_.blocks * spec_.block_tokens;
  ForSeenRuns(group, [&](const SeenRun& run) {
    const int64_t local = run.block * spec_.block_tokens + run.offset;
    if (!plane.pieces.empty()) {
      Piece& last = plane.pieces.back();
      if (last.document == run.row && last.local_begin + last.length == local &&
          last.position + last.length == run.position) {
        last.length += run.count;
        return;
      }
    }
    plane.pieces.push_back({local, run.count, run.row, run.position, 1});
  });
  call.blocks.push_back(std::move(plane));
  plan->flat = std::move(call);
}

void KvShard::PlanScattered(int group, GroupPlan* plan) const {
  ForwardCall& call = std::get<ForwardCall>(plan->scattered);
  ForSeenRuns(group, [&](const SeenRun& run) {
    KvBlock& block = call.blocks.emplace_back();
    block.rows = spec_.block_tokens;
    block.pieces.push_back({run.offset, run.count, run.row, run.position, 1});
    plan->scattered_blocks.push_back(run.block);
  });
  plan->scattered_ready = true;
}

absl::Status KvShard::Attend(const KvLayerLocation& location, GroupPlan* plan,
                             const v1::LayerCall& call, StepKernels* kernels,
                             const std::atomic<bool>& stop, v1::LayerResult* result) {
  const KvLayerGroup& group = spec_.groups[location.group];
  const Plane& plane = planes_[location.plane];
  const bool flat = IsFlat(location.group, location.plane);
  KernelCall& kernel_call = flat ? plan->flat : plan->scattered;
  ForwardCall& forward = std::get<ForwardCall>(kernel_call);
  if (flat) {
    forward.blocks[0].k = plane.k->data();
    forward.blocks[0].v = plane.v->data();
  } else {
    if (!plan->scattered_ready) PlanScattered(location.group, plan);
    for (size_t i = 0; i < forward.blocks.size(); ++i) {
      const int64_t row = plan->scattered_blocks[i] * spec_.block_tokens;
      forward.blocks[i].k = static_cast<const char*>(plane.k->data()) + row * plane.k_row_bytes;
      forward.blocks[i].v = static_cast<const char*>(plane.v->data()) + row * plane.v_row_bytes;
    }
  }
  const bool partial = call.output() == v1::KV_OUTPUT_PARTIAL;
  plan->problem.fp32_results = partial;
  forward.q = call.q().data();
  forward.out = result->mutable_out()->data();
  forward.out_acc = nullptr;
  forward.sinks = partial || group.sinks.empty()
                      ? nullptr
                      : group.sinks.data() + location.plane * group.num_heads +
                            HeadsOfGroup(location.group).begin;
  if (result->lse().empty()) {
    const size_t count = static_cast<size_t>(forward.q_rows * plan->problem.num_heads);
    if (lse_.size() < count) lse_.resize(count);
    forward.lse = lse_.data();
  } else {
    forward.lse = reinterpret_cast<float*>(result->mutable_lse()->data());
  }
  return kernels->Run(kernel_call, stop);
}

}  // namespace ringattn::worker
