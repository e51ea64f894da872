#include "common/schedule/testing/schedule_cases.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

namespace ringattn {
namespace {

std::vector<int64_t> DrawDocuments(std::mt19937& random, int documents, int64_t longest) {
  std::vector<int64_t> cu_seqlens = {0};
  for (int d = 0; d < documents; ++d) {
    const int64_t length = random() % 4 == 0 ? 0 : static_cast<int64_t>(random() % (longest + 1));
    cu_seqlens.push_back(cu_seqlens.back() + length);
  }
  return cu_seqlens;
}

// Returns a divisor of the ring size. Half of the time one between 1 and the ring size, if any.
int64_t DrawGroupSize(std::mt19937& random, int world_size) {
  std::vector<int64_t> divisors;
  for (int size = 1; size <= world_size; ++size) {
    const bool is_group = world_size % size == 0;
    const int count = size == 1 || size == world_size ? 1 : 2;
    if (is_group) divisors.insert(divisors.end(), count, size);
  }
  return divisors[random() % divisors.size()];
}

}  // namespace

AttentionSpec DenseSpec(int64_t sq, int64_t sk) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.seq_len_q = sq;
  spec.shape.seq_len_kv = sk;
  spec.shape.cu_seqlens_q = {0, sq};
  spec.shape.cu_seqlens_k = {0, sk};
  return spec;
}

ScheduleCase DrawScheduleCase(std::mt19937& random, int64_t longest) {
  const auto window = [&]() -> int64_t {
    return random() % 2 == 0 ? -1 : static_cast<int64_t>(random() % (longest / 2 + 1));
  };
  AttentionSpec spec;
  spec.dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kFloat16;
  AttentionShape& shape = spec.shape;
  const bool is_long = longest > 1000;  // takes long to simulate
  shape.num_kv_heads = int64_t{1} << random() % (is_long ? 2 : 3);
  shape.num_heads = shape.num_kv_heads * (is_long ? 1 : 1 + random() % 2);
  shape.head_dim = 1 + random() % 2;
  shape.head_dim_v = 1 + random() % 2;
  shape.packed = random() % 3 == 0;
  if (shape.packed) {
    const int documents = 1 + random() % 6;
    shape.cu_seqlens_q = DrawDocuments(random, documents, longest / 2);
    shape.cu_seqlens_k =
        random() % 2 == 0 ? shape.cu_seqlens_q : DrawDocuments(random, documents, longest / 2);
    shape.seq_len_q = shape.cu_seqlens_q.back();
    shape.seq_len_kv = shape.cu_seqlens_k.back();
  } else {
    shape.batch = 1 + random() % 2;
    shape.seq_len_q = random() % (longest + 1);
    shape.seq_len_kv = random() % 3 != 0 ? shape.seq_len_q : random() % (longest + 1);
    shape.cu_seqlens_q = {0, shape.seq_len_q};
    shape.cu_seqlens_k = {0, shape.seq_len_kv};
  }
  spec.options.causal = random() % 2 == 0;
  spec.options.window_left = window();
  spec.options.window_right = window();
  constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped,
                                 Layout::kZigzagPerDocument};
  ShardPlan plan = MakeShardPlan(spec, kLayouts[random() % 4], 1 + random() % 8,
                                 random() % 2 == 0 ? 1 : 1 + random() % 40);
  const Direction direction = random() % 3 == 0 ? Direction::kForward : Direction::kBackward;
  const bool recompute = direction == Direction::kBackward && random() % 2 == 0;
  constexpr ScheduleKind kKinds[] = {ScheduleKind::kRing,        ScheduleKind::kRing,
                                     ScheduleKind::kAllGather,   ScheduleKind::kPassQ,
                                     ScheduleKind::kReplicatedQ, ScheduleKind::kAllGather};
  ScheduleKind kind = plan.world_size == 1 && random() % 2 == 0
                          ? ScheduleKind::kSingle
                          : kKinds[random() % std::size(kKinds)];
  if (kind == ScheduleKind::kRing && random() % 2 == 0) kind = ScheduleKind::kDoubleRing;
  spec.options.sinks = random() % 3 == 0;
  spec.has_dlse = direction == Direction::kBackward && random() % 3 == 0;
  spec.fp32_results = spec.dtype != DType::kFloat32 && random() % 3 == 0;
  spec.options.segment_ids = random() % 3 == 0;
  const bool takes_pairs = !(KeepsKeysInPlace(kind) && shape.packed);
  if (random() % 3 == 0 && takes_pairs) {
    spec.options.bias = BiasForm{.per_batch = random() % 2 == 0,
                                 .per_head = random() % 2 == 0,
                                 .gradient = random() % 2 == 0};
  }
  if (random() % 3 == 0 && takes_pairs) {
    spec.options.mask = MaskForm{.per_batch = random() % 2 == 0,
                                 .per_head = random() % 2 == 0,
                                 .bits = random() % 2 == 0 && !KeepsKeysInPlace(kind)};
  }
  const std::optional<BiasForm>& bias = spec.options.bias;
  const bool sums_over_heads = bias.has_value() && bias->gradient && !bias->per_head;
  int64_t heads_per_step = 0;
  if (kind == ScheduleKind::kAllGather && !sums_over_heads && random() % 2 == 0) {
    heads_per_step = std::min<int64_t>(1 << random() % 3, shape.num_kv_heads);
  }
  const int64_t documents = shape.packed ? shape.num_documents() : shape.batch;
  const bool may_choose =
      direction == Direction::kForward && !KeepsKeysInPlace(kind) && heads_per_step == 0;
  for (int i = 0; may_choose && i < 4; ++i) {
    const auto batch = static_cast<int64_t>(random() % documents);
    const int64_t queries =
        shape.packed ? shape.cu_seqlens_q[batch + 1] - shape.cu_seqlens_q[batch] : shape.seq_len_q;
    if (queries == 0 || random() % 3 == 0) continue;
    spec.probability_rows.push_back({batch, static_cast<int64_t>(random() % queries)});
  }
  ProgramRecipe recipe = RecipeOn(plan, kind, direction, recompute);
  recipe.heads_per_step = heads_per_step;
  if (kind == ScheduleKind::kDoubleRing) recipe.group_size = DrawGroupSize(random, plan.world_size);
  return {spec, MakeShardPlan(spec, recipe, plan.world_size), recipe};
}

std::string Describe(const ScheduleCase& c, const Schedule& schedule) {
  return "heads_per_step " + std::to_string(c.recipe.heads_per_step) + " group_size " +
         std::to_string(c.recipe.group_size) + "\n" + ToString(c.plan) +
         ToString(schedule, c.spec) + "causal " + std::to_string(c.spec.options.causal) +
         " window " + std::to_string(c.spec.options.window_left) + "," +
         std::to_string(c.spec.options.window_right);
}

}  // namespace ringattn
