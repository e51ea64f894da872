#include "client/cli/bench/bench_steps.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/api/kv_cache.h"
#include "client/cli/bench/word_ping_pong.h"
#include "common/attention/dtype.h"
#include "common/base/limits.h"
#include "common/kv/cache_spec.h"
#include "common/oracle/generator.h"
#include "google/protobuf/util/message_differencer.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kRoundTrips = 100;           // before and after the steps of a level
constexpr int kWordTrips = 2000;           // of each kind, before and after the steps
constexpr int64_t kImportBytes = 8 << 20;  // of one call
constexpr int64_t kBlockTokens = 64;

double SecondsSince(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

// The smallest value that at least `fraction` of all values do not exceed.
double Percentile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<int64_t>(std::ceil(fraction * static_cast<double>(values.size())));
  return values[std::clamp<int64_t>(rank - 1, 0, static_cast<int64_t>(values.size()) - 1)];
}

double Sum(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

// call - device, by call.
std::vector<double> Overheads(const StepLevel& level) {
  std::vector<double> overheads;
  for (size_t i = 0; i < level.call_seconds.size(); ++i) {
    overheads.push_back(level.call_seconds[i] - level.device_seconds[i]);
  }
  return overheads;
}

// Tokens per second if a layer took only its device time and an empty message's round trip.
double BoundTokensPerSecond(const StepLevel& level, uint32_t layers) {
  const double seconds =
      layers * (Percentile(level.device_seconds, 0.5) + Percentile(level.round_trips, 0.5));
  return seconds > 0 ? static_cast<double>(level.batch) / seconds : 0;
}

double TokensPerSecond(const StepLevel& level) {
  return static_cast<double>(level.batch) * static_cast<double>(level.step_seconds.size()) /
         Sum(level.step_seconds);
}

// One level. Tensors are generated in parts, so nothing as long as the sequences is kept.
class StepRun {
 public:
  StepRun(const Problem& problem, uint32_t layers, int64_t batch, int64_t length, uint64_t seed)
      : seed_(seed), layers_(layers), batch_(batch), length_(length) {
    v1::KvLayerGroup* group = spec_.add_groups();
    for (uint32_t layer = 0; layer < layers; ++layer) group->add_layers(layer);
    group->set_num_heads(problem.shape.num_heads());
    group->set_num_kv_heads(problem.shape.num_kv_heads() == 0 ? problem.shape.num_heads()
                                                              : problem.shape.num_kv_heads());
    group->set_head_dim(problem.shape.head_dim());
    group->set_head_dim_v(problem.shape.head_dim_v());
    group->set_non_causal(!problem.options.causal());
    if (problem.options.has_softmax_scale()) {
      group->set_softmax_scale(problem.options.softmax_scale());
    }
    if (problem.options.has_softcap()) group->set_softcap(problem.options.softcap());
    if (problem.options.has_window() && problem.options.window().left() >= 0) {
      group->set_window_left(static_cast<uint64_t>(problem.options.window().left()));
    }
    spec_.set_dtype(problem.dtype);
    spec_.set_block_tokens(kBlockTokens);
    spec_.set_blocks(static_cast<uint64_t>(batch * ((length + kBlockTokens) / kBlockTokens + 1)));
    spec_.set_label("ringattn bench --steps");
    level_.batch = batch;
    level_.length = length;
  }

  absl::StatusOr<StepLevel> Measure(Client* client, const v1::PlanOptions& plan, int steps,
                                    const std::string& transport, absl::Duration deadline,
                                    int64_t rows, ProgressBar& bar) {
    auto parsed = ParseKvCacheSpec(spec_, Limits());
    if (!parsed.ok()) return parsed.status();
    parsed_ = *std::move(parsed);
    call_options_.deadline = deadline;
    KvCreateOptions create;
    if (plan.has_world_size()) create.world_size = plan.world_size();
    create.members.assign(plan.members().begin(), plan.members().end());
    KvOpenOptions open;
    open.transport = transport == "host_memory" ? TransportPreference::kHostMemory
                     : transport == "direct"    ? TransportPreference::kDirect
                     : transport == "relay"     ? TransportPreference::kRelay
                                                : TransportPreference::kAuto;
    auto cache = KvCache::Create(client, spec_, create, open);
    if (!cache.ok()) return cache.status();
    cache_ = *std::move(cache);
    level_.placement = cache_->placement();
    level_.transport = cache_->transport();
    level_.transport_reason = cache_->transport_reason();
    absl::Status status = Run(steps, rows, bar);
    if (absl::Status deleted = cache_->Delete(); status.ok()) status = deleted;
    if (!status.ok()) return status;
    return std::move(level_);
  }

 private:
  enum Tensor : uint64_t { kK, kV, kNewK, kNewV, kQ };

  const KvLayerGroup& group() const { return parsed_.groups[0]; }
  int64_t element() const { return ElementBytes(parsed_.dtype); }
  uint64_t Stream(Tensor tensor, uint32_t layer, int64_t row) const {
    return (static_cast<uint64_t>(tensor) * layers_ + layer) * static_cast<uint64_t>(batch_) +
           static_cast<uint64_t>(row);
  }
  std::vector<uint8_t> Make(Tensor tensor, uint32_t layer, int64_t row, int64_t first,
                            int64_t count) const {
    std::vector<uint8_t> bytes(static_cast<size_t>(count * element()));
    oracle::FillNormal(parsed_.dtype, seed_, Stream(tensor, layer, row), first, count, 1.0,
                       bytes.data());
    return bytes;
  }
  std::vector<float> MakeFloats(Tensor tensor, uint32_t layer, int64_t row, int64_t first,
                                int64_t count) const {
    const std::vector<uint8_t> bytes = Make(tensor, layer, row, first, count);
    std::vector<float> values(static_cast<size_t>(count));
    ConvertToFloat(parsed_.dtype, bytes.data(), values.data(), count);
    return values;
  }

  absl::Status Run(int steps, int64_t rows, ProgressBar& bar) {
    if (absl::Status status = Import(bar); !status.ok()) return status;
    MakeStepTensors();
    bar.Update("verifying", -1);
    // The first steps also fill caches and connections.
    for (int i = 0; i < 3; ++i) {
      if (absl::Status status = Step(nullptr); !status.ok()) return status;
    }
    Verify(rows);
    if (!level_.passed()) return absl::OkStatus();
    if (absl::Status status = MeasureRoundTrips(); !status.ok()) return status;
    for (int i = 0; i < steps; ++i) {
      if (i % 16 == 0) bar.Update("measuring", static_cast<double>(i) / steps);
      if (absl::Status status = Step(&level_); !status.ok()) return status;
    }
    return MeasureRoundTrips();
  }

  absl::Status Import(ProgressBar& bar) {
    const int64_t row_bytes =
        group().num_kv_heads * std::max(group().head_dim, group().head_dim_v) * element();
    const int64_t chunk = std::max<int64_t>(1, kImportBytes / 2 / row_bytes);
    for (int64_t row = 0; row < batch_; ++row) {
      for (int64_t first = 0; first < length_; first += chunk) {
        bar.Update("filling the cache", static_cast<double>(row * length_ + first) /
                                            static_cast<double>(batch_ * length_));
        const int64_t count = std::min(chunk, length_ - first);
        v1::StepBegin begin;
        AddRow(row, first, first, count, 0, &begin);
        if (absl::Status status = cache_->BeginStep(begin); !status.ok()) return status;
        for (uint32_t layer = 0; layer < layers_; ++layer) {
          const int64_t k_row = group().num_kv_heads * group().head_dim;
          const int64_t v_row = group().num_kv_heads * group().head_dim_v;
          const auto k = Make(kK, layer, row, first * k_row, count * k_row);
          const auto v = Make(kV, layer, row, first * v_row, count * v_row);
          KvLayerArgs args;
          args.layer = layer;
          args.output = v1::KV_OUTPUT_NONE;
          args.k = BytesOf(k);
          args.v = BytesOf(v);
          auto report = cache_->CallLayer(args, {}, call_options_);
          if (!report.ok()) return report.status();
        }
      }
    }
    return absl::OkStatus();
  }

  static void AddRow(int64_t sequence, int64_t expected, int64_t keep, int64_t append,
                     int64_t queries, v1::StepBegin* begin) {
    v1::StepRow* row = begin->add_rows();
    row->set_sequence(static_cast<uint64_t>(sequence));
    row->set_expected_length(static_cast<uint64_t>(expected));
    row->set_keep_length(static_cast<uint64_t>(keep));
    row->set_append_tokens(static_cast<uint32_t>(append));
    row->set_q_tokens(static_cast<uint32_t>(queries));
  }

  void MakeStepTensors() {
    const auto join = [&](Tensor tensor, uint32_t layer, int64_t count) {
      std::vector<uint8_t> all;
      for (int64_t row = 0; row < batch_; ++row) {
        const auto part = Make(tensor, layer, row, 0, count);
        all.insert(all.end(), part.begin(), part.end());
      }
      return all;
    };
    for (uint32_t layer = 0; layer < layers_; ++layer) {
      q_.push_back(join(kQ, layer, group().num_heads * group().head_dim));
      k_.push_back(join(kNewK, layer, group().num_kv_heads * group().head_dim));
      v_.push_back(join(kNewV, layer, group().num_kv_heads * group().head_dim_v));
      out_.emplace_back(
          static_cast<size_t>(batch_ * group().num_heads * group().head_dim_v * element()));
    }
  }

  // A decode step. It keeps `length_` entries, so all steps cost the same.
  absl::Status Step(StepLevel* level) {
    v1::StepBegin begin;
    for (int64_t row = 0; row < batch_; ++row) {
      AddRow(row, has_stepped_ ? length_ + 1 : length_, length_, 1, 1, &begin);
    }
    const auto begun = SteadyClock::now();
    if (absl::Status status = cache_->BeginStep(begin); !status.ok()) return status;
    int64_t sent = 0, received = 0;
    for (uint32_t layer = 0; layer < layers_; ++layer) {
      KvLayerArgs args;
      args.layer = layer;
      args.q = q_[layer];
      args.k = k_[layer];
      args.v = v_[layer];
      const auto called = SteadyClock::now();
      auto report = cache_->CallLayer(args, {.out = absl::MakeSpan(out_[layer])}, call_options_);
      if (!report.ok()) return report.status();
      has_stepped_ = true;
      sent += report->sent_bytes;
      received += report->received_bytes;
      if (level == nullptr) continue;
      level->call_seconds.push_back(SecondsSince(called));
      level->device_seconds.push_back(absl::ToDoubleSeconds(report->device_time));
    }
    if (level == nullptr) return absl::OkStatus();
    level->step_seconds.push_back(SecondsSince(begun));
    level->sent_bytes = sent;
    level->received_bytes = received;
    return absl::OkStatus();
  }

  absl::Status MeasureRoundTrips() {
    if (absl::Status status = cache_->CommitStep(call_options_); !status.ok()) return status;
    for (int i = 0; i < kRoundTrips; ++i) {
      const auto begun = SteadyClock::now();
      if (absl::Status status = cache_->RoundTrip(call_options_); !status.ok()) return status;
      level_.round_trips.push_back(SecondsSince(begun));
    }
    if (level_.transport == v1::TRANSPORT_HOST_MEMORY) MeasureWords();
    return absl::OkStatus();
  }

  void MeasureWords() {
    const auto add = [](std::vector<double>* to, const std::vector<double>& trips) {
      to->insert(to->end(), trips.begin(), trips.end());
    };
    add(&level_.word_trips_active, MeasureWordRoundTrips(kWordTrips, /*sleeps=*/false));
    add(&level_.word_trips_asleep, MeasureWordRoundTrips(kWordTrips, /*sleeps=*/true));
  }

  // Compares the last step's results with attention in fp64.
  void Verify(int64_t rows) {
    double worst = -1;
    for (uint32_t layer = 0; layer < layers_; ++layer) {
      for (int64_t row = 0; row < batch_ && level_.verified_rows < rows; ++row) {
        ++level_.verified_rows;
        VerifyRow(layer, row, &worst);
      }
    }
  }

  void VerifyRow(uint32_t layer, int64_t row, double* worst) {
    const int64_t heads = group().num_heads, kv_heads = group().num_kv_heads;
    const int64_t dim = group().head_dim, dim_v = group().head_dim_v;
    std::vector<float> q(heads * dim), out(heads * dim_v);
    ConvertToFloat(parsed_.dtype, q_[layer].data() + row * heads * dim * element(), q.data(),
                   heads * dim);
    ConvertToFloat(parsed_.dtype, out_[layer].data() + row * heads * dim_v * element(), out.data(),
                   heads * dim_v);
    const int64_t begin =
        group().window_left < 0 ? 0 : std::max<int64_t>(0, length_ - group().window_left);
    // Streaming softmax: the largest score so far, the sum of weights, and sums weighted by them.
    std::vector<double> most(heads, -INFINITY), total(heads, 0);
    std::vector<double> sums(heads * dim_v, 0), sizes(heads * dim_v, 0);
    const auto add = [&](const float* k, const float* v) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / group().group_size();
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) {
          score += static_cast<double>(q[h * dim + d]) * k[g * dim + d];
        }
        score *= group().softmax_scale;
        if (group().softcap > 0) score = group().softcap * std::tanh(score / group().softcap);
        if (score > most[h]) {
          const double shrink = std::exp(most[h] - score);
          most[h] = score;
          total[h] *= shrink;
          for (int64_t d = 0; d < dim_v; ++d) {
            sums[h * dim_v + d] *= shrink;
            sizes[h * dim_v + d] *= shrink;
          }
        }
        const double weight = std::exp(score - most[h]);
        total[h] += weight;
        for (int64_t d = 0; d < dim_v; ++d) {
          sums[h * dim_v + d] += weight * v[g * dim_v + d];
          sizes[h * dim_v + d] += weight * std::fabs(v[g * dim_v + d]);
        }
      }
    };
    constexpr int64_t kChunk = 4096;
    for (int64_t first = begin; first < length_; first += kChunk) {
      const int64_t count = std::min(kChunk, length_ - first);
      const auto k = MakeFloats(kK, layer, row, first * kv_heads * dim, count * kv_heads * dim);
      const auto v = MakeFloats(kV, layer, row, first * kv_heads * dim_v, count * kv_heads * dim_v);
      for (int64_t i = 0; i < count; ++i) {
        add(k.data() + i * kv_heads * dim, v.data() + i * kv_heads * dim_v);
      }
    }
    add(MakeFloats(kNewK, layer, row, 0, kv_heads * dim).data(),
        MakeFloats(kNewV, layer, row, 0, kv_heads * dim_v).data());
    // The element rule of common/oracle/comparator.h.
    const double unit = parsed_.dtype == DType::kFloat32   ? std::ldexp(1, -20)
                        : parsed_.dtype == DType::kFloat16 ? std::ldexp(1, -12)
                                                           : std::ldexp(1, -9);
    double largest = 0;
    for (int64_t i = 0; i < heads * dim_v; ++i) {
      largest = std::max(largest, sizes[i] / total[i / dim_v]);
    }
    for (int64_t i = 0; i < heads * dim_v; ++i) {
      const double error = std::fabs(out[i] - sums[i] / total[i / dim_v]);
      const double bound = 8 * unit * sizes[i] / total[i / dim_v] + 1e-6 * largest;
      // A result that is not a number exceeds every bound.
      const double ratio = std::isnan(error) ? INFINITY : error / bound;
      if (ratio <= *worst) continue;
      *worst = ratio;
      level_.error = std::isnan(error) ? INFINITY : error;
      level_.error_bound = bound;
    }
  }

  const uint64_t seed_;
  const uint32_t layers_;
  const int64_t batch_;
  const int64_t length_;
  v1::KvCacheSpec spec_;
  KvCacheSpec parsed_;
  KvCallOptions call_options_;
  std::unique_ptr<KvCache> cache_;
  std::vector<std::vector<uint8_t>> q_, k_, v_, out_;  // by layer
  bool has_stepped_ = false;
  StepLevel level_;
};

absl::Status CheckOptions(const Problem& problem) {
  v1::AttentionOptions rest = problem.options;
  rest.clear_softmax_scale();
  rest.clear_softcap();
  rest.clear_causal();
  rest.clear_window();
  if (!google::protobuf::util::MessageDifferencer::Equals(
          rest, v1::AttentionOptions::default_instance())) {
    return UsageError(
        "--steps supports --causal, --window, --softcap and --softmax_scale; remove the other "
        "options");
  }
  if (problem.options.has_window() && problem.options.window().right() > 0) {
    return UsageError("--window limits a K/V cache only on the left; use --window=LEFT,0");
  }
  if (problem.shape.has_packed()) {
    return UsageError("--steps cannot be combined with --documents; use --step_lengths");
  }
  return absl::OkStatus();
}

}  // namespace

void StepFlags::AddTo(FlagSet& command) {
  const char* kGroup = "Decode steps";
  command
      .Add("--steps", &steps,
           "Measure so many decode steps over K/V caches on the workers, instead of single calls. "
           "--batch is the number of sequences and --seq_len their length")
      .InRange(1, 1000000)
      .Group(kGroup);
  command.Add("--layers", &layers, "Layers of a step").Positive().ShowDefault().Group(kGroup);
  command
      .Add("--step_batches", &batches,
           "Several batch sizes, separated by commas, in place of --batch")
      .Delimiter(',')
      .Group(kGroup);
  command
      .Add("--step_lengths", &lengths,
           "Several lengths, separated by commas, in place of --seq_len")
      .Delimiter(',')
      .Group(kGroup);
}

absl::StatusOr<std::vector<StepLevel>> MeasureSteps(Client* client, const Problem& problem,
                                                    const StepFlags& flags,
                                                    const std::string& transport,
                                                    absl::Duration deadline, int64_t rows,
                                                    uint64_t seed, ProgressBar& bar) {
  if (absl::Status status = CheckOptions(problem); !status.ok()) return status;
  if (transport != "auto" && transport != "host_memory" && transport != "direct" &&
      transport != "relay") {
    return UsageError(absl::StrCat("--transport=", transport,
                                   ": --steps needs auto, host_memory, direct or relay"));
  }
  std::vector<uint64_t> batches = flags.batches, lengths = flags.lengths;
  if (batches.empty()) batches.push_back(problem.shape.batch());
  if (lengths.empty()) lengths.push_back(problem.shape.seq_len_q());
  for (const uint64_t value : batches) {
    if (value < 1 || value > static_cast<uint64_t>(Limits().max_step_rows)) {
      return UsageError(
          absl::StrCat("--step_batches: ", value, " is not in 1..", Limits().max_step_rows));
    }
  }
  for (const uint64_t value : lengths) {
    if (value < 1 || value > static_cast<uint64_t>(Limits().max_tokens)) {
      return UsageError(
          absl::StrCat("--step_lengths: ", value, " is not in 1..", Limits().max_tokens));
    }
  }
  std::vector<StepLevel> levels;
  for (const uint64_t batch : batches) {
    for (const uint64_t length : lengths) {
      StepRun run(problem, flags.layers, static_cast<int64_t>(batch), static_cast<int64_t>(length),
                  seed);
      auto level = run.Measure(client, problem.plan, flags.steps, transport, deadline, rows, bar);
      if (!level.ok()) return level.status();
      levels.push_back(*std::move(level));
      if (!levels.back().passed()) return levels;
    }
  }
  return levels;
}

Json StepLevel::ToJson(uint32_t layers) const {
  const auto times = [](const std::vector<double>& seconds) {
    return Json{{"p50", Percentile(seconds, 0.5)}, {"p99", Percentile(seconds, 0.99)}};
  };
  Json members = Json::array();
  for (const std::string& member : placement.members()) members.push_back(member);
  Json verified = {{"passed", passed()},
                   {"rows", verified_rows},
                   {"worst_error", error},
                   {"worst_error_bound", error_bound}};
  Json object = {{"batch", batch},
                 {"length", length},
                 {"members", members},
                 {"head_parts", placement.head_parts()},
                 {"position_parts", placement.position_parts()},
                 {"transport", ShortName(transport)},
                 {"transport_reason", transport_reason},
                 {"verified", verified}};
  if (!passed()) return object;
  const double value = TokensPerSecond(*this), bound = BoundTokensPerSecond(*this, layers);
  object["steps"] = step_seconds.size();
  object["tokens_per_second"] = {
      {"value", value}, {"bound", bound}, {"fraction", bound > 0 ? value / bound : 0}};
  object["seconds_per_output_token"] = times(step_seconds);
  object["call_seconds"] = times(call_seconds);
  object["device_seconds"] = times(device_seconds);
  object["call_minus_device_seconds"] = times(Overheads(*this));
  object["round_trip_seconds"] = times(round_trips);
  if (!word_trips_active.empty()) {
    object["word_round_trip_seconds"] = {{"active", times(word_trips_active)},
                                         {"asleep", times(word_trips_asleep)}};
  }
  object["sent_bytes_per_step"] = sent_bytes;
  object["received_bytes_per_step"] = received_bytes;
  return object;
}

std::string StepTableHead() {
  return absl::StrFormat("%6s %9s %10s %9s %9s %9s %9s %9s %9s %7s\n", "batch", "length",
                         "tokens/s", "TPOT p50", "TPOT p99", "call p50", "device", "overhead",
                         "trip p50", "bound");
}

std::string StepLevel::Text(uint32_t layers) const {
  const auto us = [](double seconds) { return seconds * 1e6; };
  const double bound = BoundTokensPerSecond(*this, layers);
  return absl::StrFormat("%6d %9d %10.1f %9.0f %9.0f %9.0f %9.0f %9.0f %9.0f %6.1f%%\n", batch,
                         length, TokensPerSecond(*this), us(Percentile(step_seconds, 0.5)),
                         us(Percentile(step_seconds, 0.99)), us(Percentile(call_seconds, 0.5)),
                         us(Percentile(device_seconds, 0.5)), us(Percentile(Overheads(*this), 0.5)),
                         us(Percentile(round_trips, 0.5)),
                         bound > 0 ? 100 * TokensPerSecond(*this) / bound : 0);
}

}  // namespace ringattn::client::cli
