#include "common/plan/schedule.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <utility>
#include <vector>

#include "common/plan/kv_route.h"
#include "common/plan/schedule_builder.h"

namespace ringattn {
namespace {

// The buffers that hold blocks on one rank, kNoBuffer until first used.
struct BlockBuffers {
  BufferId k[3] = {kNoBuffer, kNoBuffer, kNoBuffer};  // home, then slots
  BufferId v[3] = {kNoBuffer, kNoBuffer, kNoBuffer};
  BufferId dk_home = kNoBuffer;
  BufferId dv_home = kNoBuffer;
  BufferId dk_slot[2] = {kNoBuffer, kNoBuffer};
  BufferId dv_slot[2] = {kNoBuffer, kNoBuffer};
  BufferId dk_landing[2] = {kNoBuffer, kNoBuffer};
  BufferId dv_landing[2] = {kNoBuffer, kNoBuffer};
};

// Rows of a block's key tensor and of its value tensor.
struct BlockRows {
  RowsAt key;
  RowsAt value;
};

// Rows of a block whose gradients come home at a step.
struct Landing {
  int64_t at = 0;
  RowRange rows;
};

// What of [0, end) is in none of the landings, which are disjoint.
std::vector<RowRange> Gaps(std::vector<Landing> landings, int64_t end) {
  std::sort(landings.begin(), landings.end(),
            [](const Landing& a, const Landing& b) { return a.rows.begin < b.rows.begin; });
  std::vector<RowRange> gaps;
  int64_t begin = 0;
  for (const Landing& landing : landings) {
    if (landing.rows.begin > begin) gaps.push_back({begin, landing.rows.begin});
    begin = landing.rows.end;
  }
  if (end > begin) gaps.push_back({begin, end});
  return gaps;
}

// One ring pass over a route, forward or backward. `first_step` numbers its steps.
class RingPass {
 public:
  RingPass(const AttentionSpec& spec, const KvRoute& route, const RingPieces& pieces,
           bool keeps_home, std::vector<BlockBuffers>& buffers, ScheduleBuilder& builder)
      : spec_(spec),
        route_(route),
        pieces_(pieces),
        keeps_home_(keeps_home),
        buffers_(buffers),
        builder_(builder) {}

  // Returns the number of steps used.
  int64_t Forward(int64_t first_step);
  int64_t Backward(int64_t first_step);

 private:
  int SlotOf(int step) const { return keeps_home_ && step > 0 ? 2 - step % 2 : step % 2; }
  // Place of `rows` in the K/V block that `rank` holds at `step`.
  BlockRows KvPlace(int rank, int step, const RowRange& rows);
  // The same for the travelling gradients; step > 0.
  BlockRows GradientPlace(int rank, int step, const RowRange& rows);
  BlockRows HomeGradients(int rank) const;
  RowsAt InBlock(BufferId buffer, int source, int step, const RowRange& rows) const;
  BufferId Lazy(BufferId& buffer, int rank, const char* name);

  void MoveBlock(int64_t at, int from, const BlockRows& source, int to, const BlockRows& target,
                 const RowRange& rows, int64_t key_bytes, int64_t value_bytes);
  // Sends `rows`, held at `step`, to their holder from whoever has them before.
  void FetchKv(int64_t at, int source, int step, const RowRange& rows);

  KvOperand OperandOf(int rank, int step, const RowRange& rows);
  void ForwardCalls(int rank, int64_t first_step);
  void StartBackward(int rank, int64_t at);
  void BackwardPart(int source, int step, int part, int64_t at, bool* travels);
  void SendOnAndHome(int source, int step, int part, int64_t at);
  // To the owner's accumulators, where nothing is yet.
  void SendHome(int source, int step, const RowRange& part, const RowRange& rows, int64_t at);
  // To the owner, who adds them to what others have contributed to the same rows.
  void SendToLanding(int source, int step, const RowRange& rows, int64_t at);
  void OwnBlockBackward(int rank);
  // The rows that come home last, as one range; none if the rank computes on others'
  // blocks meanwhile.
  RowRange LandsLast(int rank) const;
  // REQUIRES: one range of all rows, or a batch of one.
  void AddOwnCall(int rank, const std::vector<RowRange>& ranges);
  void FinishBackward(int rank);
  void AddZero(int64_t at, int rank, const ByteRange& target);
  void AddConvert(int64_t at, int rank, BufferId source, BufferId target);

  const AttentionSpec& spec_;
  const KvRoute& route_;
  const RingPieces& pieces_;
  const bool keeps_home_;
  std::vector<BlockBuffers>& buffers_;
  ScheduleBuilder& builder_;
  int64_t own_step_ = 0;                      // backward: when ranks compute on their own blocks
  std::vector<std::vector<Landing>> landed_;  // by source: rows that are sent home
  std::vector<int64_t> others_until_;  // by rank: its last step with a call on another's block
  // The step whose block lies in a slot, on every rank: a backward pass may find
  // there what the forward pass before it left.
  int slot_step_[3] = {0, -1, -1};
};

BufferId RingPass::Lazy(BufferId& buffer, int rank, const char* name) {
  if (buffer == kNoBuffer) buffer = builder_.AddBuffer(rank, name, 0);
  return buffer;
}

RowsAt RingPass::InBlock(BufferId buffer, int source, int step, const RowRange& rows) const {
  int64_t rows_before = 0;
  for (const RowRange& range : route_.held[step][source]) {
    if (range.begin <= rows.begin && rows.end <= range.end) return {buffer, rows_before, range};
    rows_before += range.size();
  }
  assert(false && "rows are not part of the block");
  return {};
}

BlockRows RingPass::KvPlace(int rank, int step, const RowRange& rows) {
  static constexpr const char* kKeyNames[] = {"k", "kv_slot1.k", "kv_slot2.k"};
  static constexpr const char* kValueNames[] = {"v", "kv_slot1.v", "kv_slot2.v"};
  const int slot = SlotOf(step);
  BlockBuffers& buffers = buffers_[rank];
  const int source = route_.SourceOf(rank, step);
  return {InBlock(Lazy(buffers.k[slot], rank, kKeyNames[slot]), source, step, rows),
          InBlock(Lazy(buffers.v[slot], rank, kValueNames[slot]), source, step, rows)};
}

BlockRows RingPass::GradientPlace(int rank, int step, const RowRange& rows) {
  static constexpr const char* kKeyNames[] = {"dkv_slot0.dk", "dkv_slot1.dk"};
  static constexpr const char* kValueNames[] = {"dkv_slot0.dv", "dkv_slot1.dv"};
  const int slot = step % 2;
  BlockBuffers& buffers = buffers_[rank];
  const int source = route_.SourceOf(rank, step);
  return {InBlock(Lazy(buffers.dk_slot[slot], rank, kKeyNames[slot]), source, step, rows),
          InBlock(Lazy(buffers.dv_slot[slot], rank, kValueNames[slot]), source, step, rows)};
}

BlockRows RingPass::HomeGradients(int rank) const {
  const RowRange all{0, builder_.kv_rows(rank)};
  return {{buffers_[rank].dk_home, 0, all}, {buffers_[rank].dv_home, 0, all}};
}

void RingPass::MoveBlock(int64_t at, int from, const BlockRows& source, int to,
                         const BlockRows& target, const RowRange& rows, int64_t key_bytes,
                         int64_t value_bytes) {
  builder_.Move(at, from, source.key, to, target.key, rows, key_bytes);
  builder_.Move(at, from, source.value, to, target.value, rows, value_bytes);
}

void RingPass::FetchKv(int64_t at, int source, int step, const RowRange& rows) {
  if (rows.empty()) return;
  const int from = route_.SenderTo(source, step);
  const int to = route_.HolderOf(source, step);
  MoveBlock(at, from, KvPlace(from, route_.SenderStep(step), rows), to, KvPlace(to, step, rows),
            rows, builder_.KeyBytes(), builder_.ValueBytes());
}

KvOperand RingPass::OperandOf(int rank, int step, const RowRange& rows) {
  const BlockRows place = KvPlace(rank, step, rows);
  KvOperand operand;
  operand.source_rank = route_.SourceOf(rank, step);
  operand.row_begin = rows.begin;
  operand.row_end = rows.end;
  operand.k = builder_.Range(rank, place.key, builder_.KeyBytes());
  operand.v = builder_.Range(rank, place.value, builder_.ValueBytes());
  return operand;
}

// --- Forward ----------------------------------------------------------------

int64_t RingPass::Forward(int64_t first_step) {
  for (int step = 1; step < route_.steps(); ++step) {
    slot_step_[SlotOf(step)] = step;
    for (int source = 0; source < route_.world_size; ++source) {
      for (const RowRange& rows : route_.held[step][source]) {
        FetchKv(first_step + step - 1, source, step, rows);
      }
    }
  }
  for (int rank = 0; rank < route_.world_size; ++rank) ForwardCalls(rank, first_step);
  return route_.steps();
}

void RingPass::ForwardCalls(int rank, int64_t first_step) {
  if (builder_.q_rows(rank) == 0) return;
  std::vector<std::pair<int64_t, ComputeCall>> calls;
  for (int step = 0; step < route_.steps(); ++step) {
    ComputeCall call;
    call.op = ComputeCall::Op::kForward;
    const int source = route_.SourceOf(rank, step);
    for (const RowRange& rows : route_.held[step][source]) {
      const WorkCount work = pieces_.Work(rank, source, rows);
      if (work.pairs == 0) continue;
      call.kv.push_back(OperandOf(rank, step, rows));
      call.tiles += work.tiles;
      call.pairs += work.pairs;
    }
    if (!call.kv.empty()) calls.emplace_back(first_step + step, std::move(call));
  }
  // Rows that see no key at all still have to become out = 0, lse = -inf.
  if (calls.empty()) calls.emplace_back(first_step, ComputeCall{});
  calls.front().second.initial = true;
  calls.back().second.final = true;
  ProgramBuffers& roles = builder_.program(rank).roles;
  if (calls.size() > 1) {
    const int64_t elements = builder_.ShardBytes(rank, TensorId::kOut) / ElementBytes(spec_.dtype);
    roles.out_acc =
        spec_.dtype == DType::kFloat32
            ? roles.out
            : builder_.AddBuffer(rank, "out_acc", elements * ElementBytes(DType::kFloat32));
  }
  for (auto& [at, call] : calls) builder_.AddCall(at, rank, std::move(call));
}

// --- Backward ---------------------------------------------------------------
//
// Of block k > 0 the last part comes first: part p computes at
// 1 + (k - 1) * parts + (parts - 1 - p). Its keys come `parts` steps earlier, its
// accumulator leaves one step later, while the next part computes.
// Last first, because under a causal mask, zigzag, some ranks see the whole block and some
// only its first part, for which they take as long as the others for both. So whatever
// leaves at a step is complete at the same time on all ranks, and ranks that are the first
// to see a last part compute it while the first part's accumulator is still on its way.
// The rank's own block comes at the very end: what others have contributed lands in its
// accumulators meanwhile, and nothing is left to wait for when it is done.

int64_t RingPass::Backward(int64_t first_step) {
  const auto step_of = [&](int step, int part) {
    if (step == 0) return first_step;  // before any part; keys of the first ones come
    return first_step + 1 + int64_t{step - 1} * route_.parts + (route_.parts - 1 - part);
  };
  own_step_ = step_of(route_.steps() - 1, 0) + (route_.steps() > 1 ? 1 : 0);
  landed_.assign(route_.world_size, {});
  others_until_.assign(route_.world_size, -1);
  // travels[source][part]: somebody has contributed to the accumulator.
  std::vector<std::vector<char>> travels(route_.world_size, std::vector<char>(route_.parts, 0));
  for (int step = 1; step < route_.steps(); ++step) {
    const bool is_there = slot_step_[SlotOf(step)] == step;
    slot_step_[SlotOf(step)] = step;
    for (int part = 0; part < route_.parts; ++part) {
      for (int source = 0; source < route_.world_size && !is_there; ++source) {
        FetchKv(step_of(step - 1, part), source, step, route_.held[step][source][part]);
      }
      for (int source = 0; source < route_.world_size; ++source) {
        if (route_.direct) travels[source][part] = 0;
        bool travelling = travels[source][part] != 0;
        BackwardPart(source, step, part, step_of(step, part), &travelling);
        if (travelling) SendOnAndHome(source, step, part, step_of(step, part) + 1);
        travels[source][part] = travelling ? 1 : 0;
      }
    }
  }
  for (int rank = 0; rank < route_.world_size; ++rank) {
    StartBackward(rank, first_step);
    OwnBlockBackward(rank);
    FinishBackward(rank);
  }
  return own_step_ + 1 - first_step;
}

void RingPass::AddZero(int64_t at, int rank, const ByteRange& target) {
  if (target.bytes == 0) return;
  ComputeCall call;
  call.op = ComputeCall::Op::kZero;
  call.target = target;
  builder_.AddCall(at, rank, std::move(call));
}

void RingPass::AddConvert(int64_t at, int rank, BufferId source, BufferId target) {
  const ByteRange from = builder_.Whole(rank, source);
  if (source == target || from.bytes == 0) return;
  ComputeCall call;
  call.op = ComputeCall::Op::kConvert;
  call.source = from;
  call.target = builder_.Whole(rank, target);
  builder_.AddLateCall(at, rank, std::move(call));
}

void RingPass::StartBackward(int rank, int64_t at) {
  const ProgramBuffers& roles = builder_.program(rank).roles;
  if (builder_.q_rows(rank) > 0) {
    ComputeCall delta;
    delta.op = ComputeCall::Op::kDelta;
    builder_.AddCall(at, rank, std::move(delta));
  }
  AddZero(at, rank, builder_.Whole(rank, roles.dq_acc));
  // Where nothing lands, the own block starts from zero.
  const BlockRows home = HomeGradients(rank);
  for (const RowRange& rows : Gaps(landed_[rank], builder_.kv_rows(rank))) {
    builder_.ZeroRows(at, rank, home.key, rows, builder_.KeyGradientBytes());
    builder_.ZeroRows(at, rank, home.value, rows, builder_.ValueGradientBytes());
  }
}

void RingPass::OwnBlockBackward(int rank) {
  const RowRange all{0, builder_.kv_rows(rank)};
  const RowRange late = LandsLast(rank);
  // Rows of one batch row are one range of bytes, so those that land last can wait while
  // the others compute.
  const bool in_two = spec_.shape.batch == 1 && !late.empty() && late.size() < all.size();
  if (in_two) {
    AddOwnCall(rank, {{0, late.begin}, {late.end, all.end}});
    AddOwnCall(rank, {late});
  } else {
    AddOwnCall(rank, {all});
  }
}

RowRange RingPass::LandsLast(int rank) const {
  int64_t last = -1;
  for (const Landing& landing : landed_[rank]) last = std::max(last, landing.at);
  RowRange late;
  if (last <= others_until_[rank]) return late;
  for (const Landing& landing : landed_[rank]) {
    if (landing.at != last) continue;
    late = late.empty() ? landing.rows
                        : RowRange{std::min(late.begin, landing.rows.begin),
                                   std::max(late.end, landing.rows.end)};
  }
  return late;
}

void RingPass::AddOwnCall(int rank, const std::vector<RowRange>& ranges) {
  ComputeCall call;
  call.op = ComputeCall::Op::kBackward;
  const BlockBuffers& buffers = buffers_[rank];
  for (const RowRange& rows : ranges) {
    const WorkCount work = pieces_.Work(rank, rank, rows);
    if (work.pairs == 0) continue;
    const auto part = [&](BufferId buffer, int64_t row_bytes) {
      return builder_.Range(rank, {buffer, rows.begin, rows}, row_bytes);
    };
    KvOperand operand;
    operand.source_rank = rank;
    operand.row_begin = rows.begin;
    operand.row_end = rows.end;
    operand.k = part(buffers.k[0], builder_.KeyBytes());
    operand.v = part(buffers.v[0], builder_.ValueBytes());
    operand.dk = part(buffers.dk_home, builder_.KeyGradientBytes());
    operand.dv = part(buffers.dv_home, builder_.ValueGradientBytes());
    call.kv.push_back(operand);
    call.tiles += work.tiles;
    call.pairs += work.pairs;
  }
  if (!call.kv.empty()) builder_.AddCall(own_step_, rank, std::move(call));
}

void RingPass::BackwardPart(int source, int step, int part, int64_t at, bool* travels) {
  const RowRange& rows = route_.held[step][source][part];
  if (rows.empty()) return;
  const int rank = route_.HolderOf(source, step);
  const WorkCount work = pieces_.Work(rank, source, rows);
  if (work.pairs == 0) return;
  ComputeCall call;
  call.op = ComputeCall::Op::kBackward;
  call.kv.push_back(OperandOf(rank, step, rows));
  KvOperand& operand = call.kv.back();
  const BlockRows place = GradientPlace(rank, step, rows);
  operand.dk = builder_.Range(rank, place.key, builder_.KeyGradientBytes());
  operand.dv = builder_.Range(rank, place.value, builder_.ValueGradientBytes());
  call.tiles = work.tiles;
  call.pairs = work.pairs;
  if (!*travels) {
    AddZero(at, rank, operand.dk);
    AddZero(at, rank, operand.dv);
    *travels = true;
  }
  others_until_[rank] = std::max(others_until_[rank], at);
  builder_.AddCall(at, rank, std::move(call));
}

void RingPass::SendOnAndHome(int source, int step, int part, int64_t at) {
  const RowRange& rows = route_.held[step][source][part];
  if (route_.direct) {
    SendToLanding(source, step, rows, at);
    return;
  }
  const int rank = route_.HolderOf(source, step);
  RowRange next;
  if (step + 1 < route_.steps()) next = route_.held[step + 1][source][part];
  if (next.empty()) {
    SendHome(source, step, rows, rows, at);
    return;
  }
  const int to = route_.HolderOf(source, step + 1);
  MoveBlock(at, rank, GradientPlace(rank, step, rows), to, GradientPlace(to, step + 1, next), next,
            builder_.KeyGradientBytes(), builder_.ValueGradientBytes());
  // Rows that nobody after this rank sees are complete.
  SendHome(source, step, rows, {rows.begin, next.begin}, at);
  SendHome(source, step, rows, {next.end, rows.end}, at);
}

void RingPass::SendHome(int source, int step, const RowRange& part, const RowRange& rows,
                        int64_t at) {
  if (rows.empty()) return;
  const int rank = route_.HolderOf(source, step);
  MoveBlock(at, rank, GradientPlace(rank, step, part), source, HomeGradients(source), rows,
            builder_.KeyGradientBytes(), builder_.ValueGradientBytes());
  landed_[source].push_back({at, rows});
}

void RingPass::SendToLanding(int source, int step, const RowRange& rows, int64_t at) {
  const int rank = route_.HolderOf(source, step);
  static constexpr const char* kKeyNames[] = {"landing0.dk", "landing1.dk"};
  static constexpr const char* kValueNames[] = {"landing0.dv", "landing1.dv"};
  const int slot = at % 2;
  BlockBuffers& home = buffers_[source];
  const BlockRows landing{{Lazy(home.dk_landing[slot], source, kKeyNames[slot]), 0, rows},
                          {Lazy(home.dv_landing[slot], source, kValueNames[slot]), 0, rows}};
  MoveBlock(at, rank, GradientPlace(rank, step, rows), source, landing, rows,
            builder_.KeyGradientBytes(), builder_.ValueGradientBytes());
  // A step later, so that calls do not queue behind an addition that still waits.
  const int64_t add_at = std::min(at + 1, own_step_);
  const BlockRows target = HomeGradients(source);
  builder_.AddRowsLate(add_at, source, landing.key, target.key, rows, builder_.KeyGradientBytes());
  builder_.AddRowsLate(add_at, source, landing.value, target.value, rows,
                       builder_.ValueGradientBytes());
}

void RingPass::FinishBackward(int rank) {
  const Program& program = builder_.program(rank);
  const auto output = [&](TensorId id) {
    for (size_t i = 0; i < program.buffers.size(); ++i) {
      if (program.buffers[i].output == id) return static_cast<BufferId>(i);
    }
    return kNoBuffer;
  };
  AddConvert(own_step_, rank, program.roles.dq_acc, output(TensorId::kDq));
  AddConvert(own_step_, rank, buffers_[rank].dk_home, output(TensorId::kDk));
  AddConvert(own_step_, rank, buffers_[rank].dv_home, output(TensorId::kDv));
}

// --- Buffers that every program has -------------------------------------------

// An fp32 accumulator of an output: the output itself where that is fp32.
BufferId AddAccumulator(int rank, const AttentionSpec& spec, TensorId output, const char* name,
                        ScheduleBuilder& builder) {
  const BufferId buffer = builder.AddOutput(rank, output);
  if (spec.dtype == DType::kFloat32) return buffer;
  const int64_t elements = builder.ShardBytes(rank, output) / ElementBytes(spec.dtype);
  return builder.AddBuffer(rank, name, elements * ElementBytes(DType::kFloat32));
}

BlockBuffers AddFixedBuffers(int rank, const AttentionSpec& spec, Direction direction,
                             bool recompute_forward, ScheduleBuilder& builder) {
  ProgramBuffers& roles = builder.program(rank).roles;
  BlockBuffers blocks;
  roles.q = builder.AddInput(rank, TensorId::kQ);
  roles.k = blocks.k[0] = builder.AddInput(rank, TensorId::kK);
  roles.v = blocks.v[0] = builder.AddInput(rank, TensorId::kV);
  if (direction == Direction::kForward) {
    roles.out = builder.AddOutput(rank, TensorId::kOut);
    roles.lse = builder.AddOutput(rank, TensorId::kLse);
    return blocks;
  }
  const auto add = [&](TensorId id) {
    return recompute_forward ? builder.AddTensor(rank, id) : builder.AddInput(rank, id);
  };
  roles.out = add(TensorId::kOut);
  roles.lse = add(TensorId::kLse);
  roles.dout = builder.AddInput(rank, TensorId::kDout);
  roles.delta = builder.AddBuffer(rank, "delta", builder.ShardBytes(rank, TensorId::kLse));
  roles.dq_acc = AddAccumulator(rank, spec, TensorId::kDq, "dq_acc", builder);
  blocks.dk_home = AddAccumulator(rank, spec, TensorId::kDk, "dk_acc", builder);
  blocks.dv_home = AddAccumulator(rank, spec, TensorId::kDv, "dv_acc", builder);
  return blocks;
}

}  // namespace

Schedule MakeSchedule(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                      bool recompute_forward) {
  assert(plan.world_size >= 1);
  assert(direction == Direction::kBackward || !recompute_forward);
  const RingPieces pieces(spec, plan);
  const KvRoute route = MakeKvRoute(
      plan, pieces, direction == Direction::kForward ? PartRule::kSlices : PartRule::kPipeline);

  ScheduleBuilder builder(spec, plan);
  std::vector<BlockBuffers> buffers;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    buffers.push_back(AddFixedBuffers(rank, spec, direction, recompute_forward, builder));
  }
  // Backward, because the own block comes last.
  const bool keeps_home = route.direct || direction == Direction::kBackward;
  RingPass pass(spec, route, pieces, keeps_home, buffers, builder);
  int64_t steps = 0;
  if (direction == Direction::kForward || recompute_forward) steps += pass.Forward(steps);
  if (direction == Direction::kBackward) steps += pass.Backward(steps);

  Schedule schedule;
  schedule.kind = plan.world_size == 1 ? ScheduleKind::kSingle : ScheduleKind::kRing;
  schedule.direction = direction;
  schedule.recompute_forward = recompute_forward;
  schedule.direct = route.direct;
  schedule.programs = builder.Finish();
  return schedule;
}

}  // namespace ringattn
