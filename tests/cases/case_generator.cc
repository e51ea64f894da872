#include "tests/cases/case_generator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <set>

#include "common/base/limits.h"
#include "tests/cases/covering_array.h"

namespace ringattn::tests {
namespace {

struct FactorTable {
  const char* name;
  std::vector<std::string> levels;
};

const std::vector<FactorTable>& Table() {
  static const auto& table = *new std::vector<FactorTable>{
      {"dtype", {"fp32", "bf16", "fp16"}},
      {"world_size", {"1", "2", "3", "4", "8"}},
      {"layout", {"contiguous", "zigzag", "striped", "zigzag per document", "striped blocks"}},
      {"causal", {"no", "yes"}},
      {"window", {"none", "small", "left only", "right only", "one side open", "beyond the end"}},
      {"softcap", {"off", "5", "30"}},
      {"scale", {"default", "custom", "0", "negative"}},
      {"heads", {"1/1", "4/4", "4/2", "6/1", "8/2"}},
      {"head_dim", {"1", "32", "64", "80", "96", "128", "192", "256 or more", "odd"}},
      {"head_dim_v", {"equal", "smaller", "larger"}},
      {"batch", {"1", "2", "3"}},
      {"packed", {"no", "documents", "some empty"}},
      {"sq vs sk", {"equal", "less", "greater"}},
      {"length", {"0", "1", "tile - 1", "tile", "tile + 1", "prime", "uneven", "below ring"}},
      {"direction", {"forward", "backward", "backward recompute"}},
      {"data", {"normal", "huge scores"}},
  };
  return table;
}

enum LengthLevel { kZero, kOne, kTileMinusOne, kTile, kTilePlusOne, kPrime, kUneven, kBelowRing };
enum HeadDimVLevel { kEqualV, kSmallerV, kLargerV };
enum WindowLevel { kNoWindow, kSmallWindow, kLeftOnly, kRightOnly, kOneSideOpen, kBeyondTheEnd };

constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};
constexpr int64_t kHeads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}, {8, 2}};
constexpr int64_t kHeadDims[] = {1, 32, 64, 80, 96, 128, 192, 256};
// Head dims of the largest level; the case's seed chooses one.
constexpr int64_t kLargestHeadDims[] = {256, 512, kMaxHeadDim};
constexpr int64_t kOddHeadDims[] = {3, 7, 17, 33, 65, 100, 129, 255};
constexpr int64_t kPrimes[] = {2, 3, 5, 7, 13, 31, 61, 97, 127, 131, 197, 251, 293, 397};
// Kernels tile by 16 to 256 rows.
constexpr int64_t kTiles[] = {256, 128, 64, 32, 16};
constexpr int64_t kStripes[] = {2, 3, 4, 7, 16, 64};

// Levels before it are Layout's values.
constexpr int kStripedBlocks = 4;
constexpr int kHeadDimOne = 0, kHeadDimLargest = 7;
constexpr int kWorldSizeOne = 0, kNotPacked = 0, kBatchOne = 0;

bool OneWayCompatible(Factor a, int level_a, Factor b, int level_b) {
  if (a == kPackedFactor && level_a != kNotPacked && b == kBatchFactor) return level_b == kBatchOne;
  if (a == kHeadDimFactor && b == kHeadDimVFactor) {
    if (level_a == kHeadDimOne) return level_b != kSmallerV;
    if (level_a == kHeadDimLargest) return level_b != kLargerV;
  }
  if (a == kWorldSizeFactor && level_a == kWorldSizeOne && b == kLengthFactor) {
    return level_b != kUneven && level_b != kBelowRing;
  }
  return true;
}

template <typename Array>
int64_t Pick(Random& random, const Array& values) {
  return values[random.Between(0, static_cast<int64_t>(std::size(values)) - 1)];
}

// The largest of `values` that random picking may take, at least the first few.
template <typename Array>
int64_t PickUpTo(Random& random, const Array& values, int64_t limit) {
  std::vector<int64_t> allowed;
  for (const int64_t value : values) {
    if (value <= limit) allowed.push_back(value);
  }
  return allowed.empty() ? *std::min_element(std::begin(values), std::end(values))
                         : Pick(random, allowed);
}

int64_t BaseLength(LengthLevel level, int world_size, int64_t longest, Random& random) {
  switch (level) {
    case kZero:
      return 0;
    case kOne:
      return 1;
    case kTileMinusOne:
      return PickUpTo(random, kTiles, longest) - 1;
    case kTile:
      return PickUpTo(random, kTiles, longest);
    case kTilePlusOne:
      return PickUpTo(random, kTiles, longest) + 1;
    case kPrime:
      return PickUpTo(random, kPrimes, longest);
    case kUneven: {
      const int64_t length = random.Between(world_size + 1, std::max<int64_t>(longest, 20));
      return length % world_size == 0 ? length + 1 : length;
    }
    case kBelowRing:
      return random.Between(1, world_size - 1);
  }
  return 0;
}

// Both lengths of a relation: the base length is the shorter one.
void ChooseLengths(const Levels& levels, int world_size, int64_t longest, Random& random,
                   AttentionShape& shape) {
  const int64_t base =
      BaseLength(static_cast<LengthLevel>(levels[kLengthFactor]), world_size, longest, random);
  const int64_t more = base + random.Between(1, std::max<int64_t>(1, (longest + 1) / 2));
  shape.seq_len_q = levels[kRelationFactor] == 2 ? more : base;
  shape.seq_len_kv = levels[kRelationFactor] == 1 ? more : base;
}

void ChooseDocuments(const Levels& levels, Random& random, AttentionShape& shape) {
  shape.packed = levels[kPackedFactor] != kNotPacked;
  if (!shape.packed) {
    shape.cu_seqlens_q = {0, shape.seq_len_q};
    shape.cu_seqlens_k = {0, shape.seq_len_kv};
    return;
  }
  const int64_t shorter = std::min(shape.seq_len_q, shape.seq_len_kv);
  const bool some_empty = levels[kPackedFactor] == 2 || shorter < 2;
  const int64_t wanted = random.Between(2, 5);
  const int64_t documents = some_empty ? wanted : std::min(wanted, shorter);
  const uint64_t seed = random.Bits();
  shape.cu_seqlens_q = oracle::SplitDocuments(shape.seq_len_q, documents, some_empty, seed);
  // Equal totals: the same documents on both sides, as in self-attention.
  const bool same = shape.seq_len_q == shape.seq_len_kv;
  shape.cu_seqlens_k =
      oracle::SplitDocuments(shape.seq_len_kv, documents, some_empty, same ? seed : seed + 1);
}

void ChooseWindow(WindowLevel level, int64_t longest, Random& random, AttentionOptions& options) {
  const int64_t left = random.Between(0, longest / 4 + 1);
  const int64_t right = random.Between(0, longest / 4 + 1);
  switch (level) {
    case kNoWindow:
      return;
    case kSmallWindow:
      options.window_left = left;
      options.window_right = right;
      return;
    case kLeftOnly:
      options.window_left = left;
      options.window_right = 0;
      return;
    case kRightOnly:
      options.window_left = 0;
      options.window_right = right;
      return;
    case kOneSideOpen:
      (random.Bits() % 2 == 0 ? options.window_left : options.window_right) = left;
      return;
    case kBeyondTheEnd:
      options.window_left = longest + left;
      options.window_right = longest + right;
      return;
  }
}

Case MakeCase(int64_t index, const Levels& levels, uint64_t seed, int64_t max_cost) {
  Random random(seed ^ 0xC0FFEE, static_cast<uint64_t>(index));
  Case c;
  c.index = index;
  c.levels = levels;
  c.spec.dtype = static_cast<DType>(levels[kDTypeFactor]);
  c.world_size = kWorldSizes[levels[kWorldSizeFactor]];
  const bool striped_blocks = levels[kLayoutFactor] == kStripedBlocks;
  c.layout = striped_blocks ? Layout::kStriped : static_cast<Layout>(levels[kLayoutFactor]);
  c.stripe = striped_blocks ? Pick(random, kStripes) : 1;
  c.direction = levels[kDirectionFactor] == 0 ? Direction::kForward : Direction::kBackward;
  c.recompute_forward = levels[kDirectionFactor] == 2;
  c.data = static_cast<oracle::DataKind>(levels[kDataFactor]);
  c.data_seed = random.Bits();

  AttentionShape& shape = c.spec.shape;
  shape.batch = levels[kBatchFactor] + 1;
  shape.num_heads = kHeads[levels[kHeadsFactor]][0];
  shape.num_kv_heads = kHeads[levels[kHeadsFactor]][1];
  const int head_dim = levels[kHeadDimFactor];
  shape.head_dim = head_dim == 8 ? Pick(random, kOddHeadDims) : kHeadDims[head_dim];
  if (head_dim == kHeadDimLargest) shape.head_dim = kLargestHeadDims[c.data_seed % 3];
  shape.head_dim_v = shape.head_dim;
  if (levels[kHeadDimVFactor] == kSmallerV) {
    shape.head_dim_v = random.Between(1, shape.head_dim - 1);
  }
  if (levels[kHeadDimVFactor] == kLargerV) {
    const int64_t largest = std::min<int64_t>(256, 2 * shape.head_dim);
    shape.head_dim_v = random.Between(shape.head_dim + 1, largest);
  }
  // The cost of a square problem; other shapes cost up to 1.5 times as much.
  const double per_pair =
      static_cast<double>(shape.batch * shape.num_heads * (shape.head_dim + shape.head_dim_v));
  const int64_t longest = std::clamp<int64_t>(
      static_cast<int64_t>(std::sqrt(static_cast<double>(max_cost) / per_pair)), 17, 400);
  ChooseLengths(levels, c.world_size, longest, random, shape);
  ChooseDocuments(levels, random, shape);

  AttentionOptions& options = c.spec.options;
  options.causal = levels[kCausalFactor] == 1;
  options.softcap = levels[kSoftcapFactor] == 0 ? 0.0 : levels[kSoftcapFactor] == 1 ? 5.0 : 30.0;
  const double usual = 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  const double factors[] = {1.0, 0.25 * static_cast<double>(random.Between(1, 12)), 0.0, -1.0};
  options.softmax_scale = usual * factors[levels[kScaleFactor]];
  ChooseWindow(static_cast<WindowLevel>(levels[kWindowFactor]),
               std::max(shape.seq_len_q, shape.seq_len_kv), random, options);
  return c;
}

std::string Join(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) {
    if (!text.empty()) text += ',';
    text += std::to_string(value);
  }
  return text;
}

}  // namespace

const char* FactorName(Factor factor) { return Table()[factor].name; }
const std::vector<std::string>& LevelNames(Factor factor) { return Table()[factor].levels; }

bool Compatible(Factor a, int level_a, Factor b, int level_b) {
  return OneWayCompatible(a, level_a, b, level_b) && OneWayCompatible(b, level_b, a, level_a);
}

namespace {

// Score terms: of every kind in a case or none, in all combinations over the cases.
void AddScoreTerms(Case& c) {
  const uint64_t bits = oracle::RandomBits(c.data_seed, 0x0973, static_cast<uint64_t>(c.index));
  const auto draw = [&](int shift, uint64_t levels) { return (bits >> shift) % levels; };
  const AttentionShape& shape = c.spec.shape;
  AttentionOptions& options = c.spec.options;
  if (draw(0, 3) == 0) {
    options.bias = BiasForm{.per_batch = draw(4, 2) == 0,
                            .per_head = draw(6, 2) == 0,
                            .float32 = draw(8, 2) == 0,
                            .before_softcap = draw(10, 3) == 0,
                            .gradient = draw(12, 3) != 0};
  }
  if (draw(14, 4) == 0) {
    options.mask = MaskForm{
        .per_batch = draw(18, 2) == 0, .per_head = draw(20, 2) == 0, .bits = draw(22, 2) == 0};
  }
  options.segment_ids = draw(24, 4) == 0;
  if (draw(28, 4) == 0) {
    const int64_t batch_rows = shape.packed ? shape.num_documents() : shape.batch;
    const int64_t count = draw(32, 2) == 0 ? shape.num_heads : batch_rows * shape.num_heads;
    for (int64_t i = 0; i < count; ++i) {
      // 2^-1 to 2^-8, and none.
      options.alibi_slopes.push_back(i % 9 == 8 ? 0.0f
                                                : std::ldexp(1.0f, -1 - static_cast<int>(i % 9)));
    }
  }
  constexpr uint32_t kThresholds[] = {6554, 32768, 63570};  // 0.1, 0.5, 0.97
  if (draw(36, 4) == 0) {
    options.dropout.threshold = kThresholds[draw(40, 3)];
    options.dropout.seed = oracle::RandomBits(c.data_seed, 0x0974, 0);
    if (draw(44, 2) == 0) {
      options.dropout.first_batch = 5;
      options.dropout.first_head = 3;
      options.dropout.first_query = 1'000'000;
      options.dropout.first_key = 77;
    }
  }
}

// One of all kinds for several ranks, unless what the case has forbids it (validation.h): then
// what is nearest to it.
void ChooseSchedule(Case& c) {
  const uint64_t bits = oracle::RandomBits(c.data_seed, 0x0975, static_cast<uint64_t>(c.index));
  const AttentionOptions& options = c.spec.options;
  constexpr ScheduleKind kKinds[] = {ScheduleKind::kRing, ScheduleKind::kAllGather,
                                     ScheduleKind::kPassQ, ScheduleKind::kReplicatedQ,
                                     ScheduleKind::kAllGather};
  c.schedule = kKinds[bits % std::size(kKinds)];
  if (PairAxisOf(c.schedule, options) == Axis::kKv && UnshardableByKeys(c.spec) != nullptr) {
    c.schedule = bits / 8 % 2 == 0 ? ScheduleKind::kRing : ScheduleKind::kAllGather;
  }
  if (c.schedule == ScheduleKind::kRing && bits / 32 % 2 == 0) {
    c.schedule = ScheduleKind::kDoubleRing;
    std::vector<int64_t> sizes;
    for (int64_t size = 1; size <= c.world_size; ++size) {
      if (c.world_size % size == 0) sizes.push_back(size);
    }
    c.group_size = sizes[bits / 1024 % sizes.size()];
  }
  const bool sums_over_heads =
      options.bias.has_value() && options.bias->gradient && !options.bias->per_head;
  if (c.schedule != ScheduleKind::kAllGather || bits / 16 % 3 == 0 || sums_over_heads) return;
  std::vector<int64_t> divisors;
  for (int64_t heads = 1; heads <= c.spec.shape.num_kv_heads; ++heads) {
    if (c.spec.shape.num_kv_heads % heads == 0) divisors.push_back(heads);
  }
  c.heads_per_step = divisors[bits / 64 % divisors.size()];
}

}  // namespace

namespace {

// Adds dilation to every second case that may have it (common/request/dilation_rules.h): one level,
// several, or one for each of the groups that the heads are split into.
void AddDilation(Case& c) {
  const auto draw = [&](uint64_t number, int64_t levels) {
    const uint64_t bits =
        oracle::RandomBits(c.data_seed, 0x0976, static_cast<uint64_t>(c.index) * 64 + number);
    return static_cast<int64_t>(bits % static_cast<uint64_t>(levels));
  };
  const AttentionShape& shape = c.spec.shape;
  if (shape.cu_seqlens_q != shape.cu_seqlens_k || c.heads_per_step != 0 || draw(0, 2) == 0) return;
  if (PairAxisOf(c.schedule, c.spec.options) == Axis::kKv) return;
  AttentionOptions& options = c.spec.options;
  const int64_t heads = shape.num_heads;
  const int64_t count = 1 + draw(1, 3);
  const bool split = count <= heads && draw(2, 2) == 0;
  for (int64_t i = 0; i < count; ++i) {
    DilationLevel level;
    level.dilation_rate = 1 + draw(10 * i + 3, 5);
    // Shorter than the rate, a multiple of it, any, or beyond the end.
    const int64_t lengths[] = {1 + draw(10 * i + 4, 4),
                               level.dilation_rate * (1 + draw(10 * i + 5, 30)),
                               1 + draw(10 * i + 6, 150), 1000};
    level.segment_length = lengths[draw(10 * i + 7, 4)];
    if (draw(10 * i + 8, 2) == 0) level.offset = draw(10 * i + 9, level.dilation_rate);
    level.head_begin = split ? heads * i / count : 0;
    level.head_end = split ? heads * (i + 1) / count : heads;
    options.dilation_levels.push_back(level);
  }
  // Its gradient is a sum over levels.
  if (options.bias.has_value() && options.bias->gradient) {
    options.bias->float32 = c.spec.dtype != DType::kFloat32;
  }
}

// Every third forward that e4m3 computes.
bool IsDrawnFloat8(const Case& c) {
  const AttentionShape& shape = c.spec.shape;
  return c.direction == Direction::kForward && c.spec.dtype != DType::kFloat32 &&
         std::max(shape.head_dim, shape.head_dim_v) <= 128 &&
         oracle::RandomBits(c.data_seed, 0x0976, static_cast<uint64_t>(c.index)) % 3 == 0;
}

}  // namespace

void AddOptions(Case& c, bool score_terms, bool float8) {
  if (float8 && IsDrawnFloat8(c)) {
    c.spec.options.compute_dtype = ComputeDType::kFloat8E4M3;
    c.spec.shape.head_dim = (c.spec.shape.head_dim + 7) / 8 * 8;
    c.spec.shape.head_dim_v = (c.spec.shape.head_dim_v + 7) / 8 * 8;
  } else if (score_terms) {
    AddScoreTerms(c);
  }
  const uint64_t bits = oracle::RandomBits(c.data_seed, 0x0971, static_cast<uint64_t>(c.index));
  ChooseSchedule(c);
  c.spec.options.sinks = bits % 3 != 0;
  c.spec.has_dlse = c.direction == Direction::kBackward && bits / 3 % 2 == 0;
  c.spec.fp32_results = c.spec.dtype != DType::kFloat32 && bits / 12 % 2 == 0;
  AddDilation(c);
  AttentionShape& shape = c.spec.shape;
  if (!shape.packed || bits / 6 % 2 == 0) return;
  // Each document's own mask, instead of one for all.
  const int64_t documents = shape.num_documents();
  for (int64_t d = 0; d < documents; ++d) {
    const uint64_t drawn = oracle::RandomBits(c.data_seed, 0x0972, static_cast<uint64_t>(d));
    const auto side = [&](uint64_t more) {
      return drawn / more % 2 == 0 ? -1 : static_cast<int64_t>(drawn / more / 2 % 40);
    };
    shape.document_rules.push_back({drawn % 2 == 0, side(2), side(1000)});
  }
  c.spec.options.causal = false;
  c.spec.options.window_left = c.spec.options.window_right = -1;
}

void AddProbabilityRows(Case& c) {
  const AttentionShape& shape = c.spec.shape;
  const auto draw = [&](uint64_t number) {
    return oracle::RandomBits(c.data_seed, 0x0973, number);
  };
  if (c.direction == Direction::kBackward || draw(0) % 2 == 0) return;
  // These return none (common/request/validation.cc).
  if (KeepsKeysInPlace(c.schedule) || c.heads_per_step != 0) return;
  if (!c.spec.options.dilation_levels.empty()) return;
  if (c.spec.options.compute_dtype != ComputeDType::kAsInputs) return;
  const int64_t batches = shape.packed ? shape.num_documents() : shape.batch;
  const auto count = static_cast<int64_t>(1 + draw(1) % 7);
  for (int64_t i = 0; i < count; ++i) {
    const auto batch = static_cast<int64_t>(draw(2 * i + 2) % batches);
    const int64_t queries =
        shape.packed ? shape.cu_seqlens_q[batch + 1] - shape.cu_seqlens_q[batch] : shape.seq_len_q;
    if (queries == 0) continue;
    c.spec.probability_rows.push_back({batch, static_cast<int64_t>(draw(2 * i + 3) % queries)});
  }
}

void CutRing(Case& c, int max_world_size) {
  c.world_size = std::min(c.world_size, max_world_size);
  if (c.group_size != 0) c.group_size = std::gcd(c.group_size, int64_t{c.world_size});
}

std::string ToString(const Case& c) {
  const AttentionShape& shape = c.spec.shape;
  const AttentionOptions& options = c.spec.options;
  char text[512];
  std::snprintf(text, sizeof(text),
                "--case=%lld: %s %s W=%d %s%s B=%lld Sq=%lld Sk=%lld H=%lld/%lld D=%lld Dv=%lld%s "
                "window=(%lld,%lld) softcap=%g scale=%.9g data=%s",
                static_cast<long long>(c.index),
                LevelNames(kDirectionFactor)[c.levels[kDirectionFactor]].c_str(),
                LevelNames(kDTypeFactor)[c.levels[kDTypeFactor]].c_str(), c.world_size,
                LevelNames(kLayoutFactor)[c.levels[kLayoutFactor]].c_str(),
                c.stripe > 1 ? (" of " + std::to_string(c.stripe)).c_str() : "",
                static_cast<long long>(shape.batch), static_cast<long long>(shape.seq_len_q),
                static_cast<long long>(shape.seq_len_kv), static_cast<long long>(shape.num_heads),
                static_cast<long long>(shape.num_kv_heads), static_cast<long long>(shape.head_dim),
                static_cast<long long>(shape.head_dim_v), options.causal ? " causal" : "",
                static_cast<long long>(options.window_left),
                static_cast<long long>(options.window_right), options.softcap,
                options.softmax_scale, oracle::DataKindName(c.data));
  std::string line = text;
  if (c.world_size > 1 && c.schedule != ScheduleKind::kRing) {
    line += std::string(" ") + ScheduleKindName(c.schedule);
    if (c.heads_per_step != 0) line += "(" + std::to_string(c.heads_per_step) + ")";
    if (c.group_size != 0) line += "(groups of " + std::to_string(c.group_size) + ")";
  }
  if (options.compute_dtype != ComputeDType::kAsInputs) line += " fp8";
  if (options.sinks) line += " sinks";
  if (c.spec.has_dlse) line += " dlse";
  if (c.spec.fp32_results) line += " fp32 results";
  if (options.bias.has_value()) {
    line += std::string(" bias(") + (options.bias->per_batch ? "B" : "1") +
            (options.bias->per_head ? ",H" : ",1") + (options.bias->float32 ? ",fp32" : "") +
            (options.bias->before_softcap ? ",before cap" : "") +
            (options.bias->gradient ? ",dbias" : "") + ")";
  }
  if (options.mask.has_value()) {
    line += std::string(" mask(") + (options.mask->per_batch ? "B" : "1") +
            (options.mask->per_head ? ",H" : ",1") + (options.mask->bits ? ",bits)" : ")");
  }
  if (options.segment_ids) line += " segment ids";
  if (!options.alibi_slopes.empty()) {
    line += " alibi(" + std::to_string(options.alibi_slopes.size()) + ")";
  }
  if (options.dropout.threshold != 0) {
    line += " dropout=" + std::to_string(options.dropout.threshold / 65536.0);
  }
  for (const DilationLevel& level : options.dilation_levels) {
    line += " dilation(" + std::to_string(level.segment_length) + ":" +
            std::to_string(level.dilation_rate) +
            (level.offset.has_value() ? "+" + std::to_string(*level.offset) : "") + " heads " +
            std::to_string(level.head_begin) + ".." + std::to_string(level.head_end) + ")";
  }
  if (!c.spec.probability_rows.empty()) {
    line += " probabilities";
    for (const ProbabilityRow& row : c.spec.probability_rows) {
      line += " " + std::to_string(row.batch) + ":" + std::to_string(row.position);
    }
  }
  if (!shape.document_rules.empty()) line += " rules per document";
  if (shape.packed) {
    line += " cu_q=" + Join(shape.cu_seqlens_q) + " cu_k=" + Join(shape.cu_seqlens_k);
  }
  return line;
}

std::vector<Case> GenerateCases(uint64_t seed, int64_t count, int64_t max_cost) {
  std::vector<int> level_counts;
  for (const FactorTable& factor : Table()) {
    level_counts.push_back(static_cast<int>(factor.levels.size()));
  }
  CoveringArray array(
      level_counts,
      [](int a, int level_a, int b, int level_b) {
        return Compatible(static_cast<Factor>(a), level_a, static_cast<Factor>(b), level_b);
      },
      seed);
  std::vector<Case> cases;
  for (int64_t index = 0; index < count; ++index) {
    const std::vector<int> row = array.Next();
    Levels levels;
    std::copy(row.begin(), row.end(), levels.begin());
    cases.push_back(MakeCase(index, levels, seed, max_cost));
  }
  return cases;
}

Coverage CoverageOf(const std::vector<Case>& cases) {
  Coverage coverage;
  // A pair or triple as a tuple of (factor, level); -1 fills a pair's third place.
  using Key = std::array<int, 6>;
  std::map<Key, int64_t> pairs;
  std::set<Key> triples;
  for (const Case& c : cases) {
    for (int x = 0; x < kFactorCount; ++x) {
      for (int y = x + 1; y < kFactorCount; ++y) {
        ++pairs[{x, c.levels[x], y, c.levels[y], -1, -1}];
        for (int z = y + 1; z < kFactorCount; ++z) {
          triples.insert({x, c.levels[x], y, c.levels[y], z, c.levels[z]});
        }
      }
    }
  }
  const auto count = [](int factor) {
    return static_cast<int>(LevelNames(static_cast<Factor>(factor)).size());
  };
  const auto fits = [](int a, int level_a, int b, int level_b) {
    return Compatible(static_cast<Factor>(a), level_a, static_cast<Factor>(b), level_b);
  };
  coverage.fewest_per_pair = static_cast<int64_t>(cases.size());
  for (int x = 0; x < kFactorCount; ++x) {
    for (int y = x + 1; y < kFactorCount; ++y) {
      for (int i = 0; i < count(x); ++i) {
        for (int j = 0; j < count(y); ++j) {
          if (!fits(x, i, y, j)) continue;
          ++coverage.pairs;
          const auto found = pairs.find({x, i, y, j, -1, -1});
          const int64_t met = found == pairs.end() ? 0 : found->second;
          coverage.covered_pairs += met > 0 ? 1 : 0;
          coverage.fewest_per_pair = std::min(coverage.fewest_per_pair, met);
          for (int z = y + 1; z < kFactorCount; ++z) {
            for (int l = 0; l < count(z); ++l) {
              if (!fits(x, i, z, l) || !fits(y, j, z, l)) continue;
              ++coverage.triples;
            }
          }
        }
      }
    }
  }
  coverage.covered_triples = static_cast<int64_t>(triples.size());
  return coverage;
}

std::string ToString(const Coverage& coverage) {
  char text[256];
  std::snprintf(
      text, sizeof(text),
      "pairs covered %lld of %lld, each at least %lld times; "
      "triples %lld of %lld (%.1f%%)",
      static_cast<long long>(coverage.covered_pairs), static_cast<long long>(coverage.pairs),
      static_cast<long long>(coverage.fewest_per_pair),
      static_cast<long long>(coverage.covered_triples), static_cast<long long>(coverage.triples),
      100.0 * static_cast<double>(coverage.covered_triples) /
          static_cast<double>(std::max<int64_t>(coverage.triples, 1)));
  return text;
}

}  // namespace ringattn::tests
