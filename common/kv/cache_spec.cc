#include "common/kv/cache_spec.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/attention/band.h"
#include "common/kv/kv_error.h"
#include "common/wire/proto_values.h"

namespace ringattn {
namespace {

constexpr size_t kMaxLabelBytes = 128;
constexpr int64_t kDefaultBlockTokens = 64;

// "spec.groups[1].num_heads is 0; <rule>".
template <typename Value>
absl::Status Invalid(const std::string& field, const Value& value, absl::string_view rule) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; ", rule));
}

// A count from 1 to `limit`.
absl::Status CheckCount(const std::string& field, uint64_t value, int64_t limit) {
  if (value == 0) return Invalid(field, value, "it must be at least 1");
  if (value > static_cast<uint64_t>(limit)) return KvOverLimit(field, value, limit);
  return absl::OkStatus();
}

absl::Status ParseSinks(const std::string& field, const std::string& bytes, KvLayerGroup* group) {
  if (bytes.empty()) return absl::OkStatus();
  const size_t expected = sizeof(float) * group->layers.size() * group->num_heads;
  if (bytes.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has ", bytes.size(), " bytes; ", group->layers.size(), " layers of ",
                     group->num_heads, " heads in fp32 need ", expected));
  }
  group->sinks.resize(expected / sizeof(float));
  std::memcpy(group->sinks.data(), bytes.data(), expected);
  for (size_t i = 0; i < group->sinks.size(); ++i) {
    const float sink = group->sinks[i];
    // -inf is no sink. A NaN or +inf would make every result of the head NaN.
    if (std::isnan(sink) || (std::isinf(sink) && sink > 0)) {
      return Invalid(absl::StrCat(field, "[", i, "]"), sink, "it must be finite or -inf");
    }
  }
  return absl::OkStatus();
}

absl::Status ParseNumbers(const std::string& at, const v1::KvLayerGroup& from, const Limits& limits,
                          KvLayerGroup* group) {
  if (auto status = CheckCount(at + "num_heads", from.num_heads(), limits.max_heads); !status.ok())
    return status;
  if (auto status = CheckCount(at + "num_kv_heads", from.num_kv_heads(), limits.max_heads);
      !status.ok())
    return status;
  if (from.num_heads() % from.num_kv_heads() != 0) {
    return Invalid(at + "num_kv_heads", from.num_kv_heads(),
                   absl::StrCat("it must divide num_heads, ", from.num_heads()));
  }
  if (auto status = CheckCount(at + "head_dim", from.head_dim(), limits.max_kv_head_dim);
      !status.ok())
    return status;
  if (from.head_dim_v() > static_cast<uint64_t>(limits.max_kv_head_dim)) {
    return KvOverLimit(at + "head_dim_v", from.head_dim_v(), limits.max_kv_head_dim);
  }
  group->num_heads = from.num_heads();
  group->num_kv_heads = from.num_kv_heads();
  group->head_dim = from.head_dim();
  group->head_dim_v = from.head_dim_v() == 0 ? from.head_dim() : from.head_dim_v();

  group->softmax_scale = from.has_softmax_scale()
                             ? from.softmax_scale()
                             : 1.0 / std::sqrt(static_cast<double>(group->head_dim));
  if (!(std::abs(group->softmax_scale) <= FLT_MAX)) {
    return Invalid(at + "softmax_scale", from.softmax_scale(), "it must be finite in fp32");
  }
  if (from.has_softcap()) {
    group->softcap = from.softcap();
    if (!(group->softcap >= FLT_MIN && group->softcap <= FLT_MAX)) {
      return Invalid(at + "softcap", from.softcap(),
                     "it must be finite and greater than 0 in fp32; leave it out for no softcap");
    }
  }
  // A window longer than any sequence is unbounded.
  if (from.has_window_left() && from.window_left() < static_cast<uint64_t>(kUnboundedBand)) {
    group->window_left = static_cast<int64_t>(from.window_left());
  }
  group->causal = !from.non_causal();
  return absl::OkStatus();
}

absl::Status ParseGroup(const std::string& at, const v1::KvLayerGroup& from, const Limits& limits,
                        KvLayerGroup* group) {
  if (from.layers().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(at, "layers is empty; a group has at least one layer"));
  }
  group->layers.assign(from.layers().begin(), from.layers().end());
  if (auto status = ParseNumbers(at, from, limits, group); !status.ok()) return status;
  if (from.latent_rank() != 0) {
    return absl::UnimplementedError(absl::StrCat(at, "latent_rank is ", from.latent_rank(),
                                                 "; latent attention is not served yet, use 0"));
  }
  if (from.storage() != v1::KV_STORAGE_UNSPECIFIED && from.storage() != v1::KV_STORAGE_AS_DTYPE) {
    return absl::UnimplementedError(
        absl::StrCat(at, "storage is ", from.storage(), "; only KV_STORAGE_AS_DTYPE is served"));
  }
  return ParseSinks(at + "sinks", from.sinks(), group);
}

absl::Status ParseDType(v1::DataType from, DType* dtype) {
  switch (from) {
    case v1::DATA_TYPE_FLOAT32:
      *dtype = DType::kFloat32;
      return absl::OkStatus();
    case v1::DATA_TYPE_BFLOAT16:
      *dtype = DType::kBFloat16;
      return absl::OkStatus();
    case v1::DATA_TYPE_FLOAT16:
      *dtype = DType::kFloat16;
      return absl::OkStatus();
    default:
      return Invalid("spec.dtype", static_cast<int>(from),
                     "use DATA_TYPE_FLOAT32, DATA_TYPE_BFLOAT16 or DATA_TYPE_FLOAT16");
  }
}

absl::Status ParseBlocks(const v1::KvCacheSpec& from, const Limits& limits, KvCacheSpec* spec) {
  spec->block_tokens = from.block_tokens() == 0 ? kDefaultBlockTokens : from.block_tokens();
  const bool power_of_two = (spec->block_tokens & (spec->block_tokens - 1)) == 0;
  if (!power_of_two || spec->block_tokens < kMinKvBlockTokens ||
      spec->block_tokens > kMaxKvBlockTokens) {
    return Invalid("spec.block_tokens", from.block_tokens(), "use 16, 32, 64, 128 or 256");
  }
  if (auto status = CheckCount("spec.blocks", from.blocks(), limits.max_kv_blocks); !status.ok())
    return status;
  spec->blocks = static_cast<int64_t>(from.blocks());
  switch (from.numbering()) {
    case v1::KV_NUMBERING_UNSPECIFIED:
    case v1::KV_NUMBERING_SEQUENCES:
      spec->numbering = KvNumbering::kSequences;
      return absl::OkStatus();
    case v1::KV_NUMBERING_BLOCKS:
      spec->numbering = KvNumbering::kBlocks;
      return absl::OkStatus();
    default:
      return Invalid("spec.numbering", static_cast<int>(from.numbering()),
                     "use KV_NUMBERING_SEQUENCES or KV_NUMBERING_BLOCKS");
  }
}

absl::Status CheckLabel(const std::string& label) {
  if (label.size() > kMaxLabelBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("spec.label has ", label.size(), " bytes; the maximum is ", kMaxLabelBytes));
  }
  for (size_t i = 0; i < label.size(); ++i) {
    if (label[i] < 0x20 || label[i] > 0x7e) {
      return absl::InvalidArgumentError(
          absl::StrCat("spec.label has byte ", static_cast<int>(static_cast<uint8_t>(label[i])),
                       " at ", i, "; only printable ASCII is accepted"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLayers(const KvCacheSpec& spec, const Limits& limits) {
  absl::flat_hash_set<uint32_t> layers;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    for (size_t i = 0; i < spec.groups[g].layers.size(); ++i) {
      if (layers.insert(spec.groups[g].layers[i]).second) continue;
      return Invalid(absl::StrCat("spec.groups[", g, "].layers[", i, "]"), spec.groups[g].layers[i],
                     "every layer belongs to one group, once");
    }
  }
  return absl::OkStatus();
}

}  // namespace

int64_t KvCacheSpec::planes() const {
  size_t planes = 0;
  for (const KvLayerGroup& group : groups) planes = std::max(planes, group.layers.size());
  return static_cast<int64_t>(planes);
}

std::optional<KvLayerLocation> FindLayer(const KvCacheSpec& spec, uint32_t layer) {
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    const std::vector<uint32_t>& layers = spec.groups[g].layers;
    const auto found = std::find(layers.begin(), layers.end(), layer);
    if (found != layers.end()) {
      return KvLayerLocation{static_cast<int>(g), static_cast<int>(found - layers.begin())};
    }
  }
  return std::nullopt;
}

absl::StatusOr<KvCacheSpec> ParseKvCacheSpec(const v1::KvCacheSpec& from, const Limits& limits) {
  // Before anything is copied.
  if (const int64_t bytes = static_cast<int64_t>(from.ByteSizeLong());
      bytes > limits.max_kv_spec_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("spec has ", bytes, " bytes; the maximum is ", limits.max_kv_spec_bytes));
  }
  KvCacheSpec spec;
  if (from.groups().empty()) {
    return absl::InvalidArgumentError("spec.groups is empty; a cache has at least one group");
  }
  int64_t layers = 0;
  for (const v1::KvLayerGroup& group : from.groups()) layers += group.layers_size();
  if (layers > limits.max_kv_layers) {
    return KvOverLimit("the number of layers in spec.groups", layers, limits.max_kv_layers);
  }
  if (auto status = ParseDType(from.dtype(), &spec.dtype); !status.ok()) return status;
  if (auto status = ParseBlocks(from, limits, &spec); !status.ok()) return status;
  if (auto status = CheckLabel(from.label()); !status.ok()) return status;
  spec.label = from.label();
  spec.groups.resize(from.groups_size());
  for (int g = 0; g < from.groups_size(); ++g) {
    const std::string at = absl::StrCat("spec.groups[", g, "].");
    if (auto status = ParseGroup(at, from.groups(g), limits, &spec.groups[g]); !status.ok()) {
      return status;
    }
  }
  if (auto status = CheckLayers(spec, limits); !status.ok()) return status;
  return spec;
}

v1::KvCacheSpec ToProto(const KvCacheSpec& spec) {
  v1::KvCacheSpec to;
  to.set_dtype(ToProto(spec.dtype));
  to.set_block_tokens(static_cast<uint32_t>(spec.block_tokens));
  to.set_blocks(static_cast<uint64_t>(spec.blocks));
  to.set_numbering(spec.numbering == KvNumbering::kBlocks ? v1::KV_NUMBERING_BLOCKS
                                                          : v1::KV_NUMBERING_SEQUENCES);
  to.set_label(spec.label);
  for (const KvLayerGroup& from : spec.groups) {
    v1::KvLayerGroup* group = to.add_groups();
    group->mutable_layers()->Add(from.layers.begin(), from.layers.end());
    group->set_num_heads(static_cast<uint32_t>(from.num_heads));
    group->set_num_kv_heads(static_cast<uint32_t>(from.num_kv_heads));
    group->set_head_dim(static_cast<uint32_t>(from.head_dim));
    group->set_head_dim_v(static_cast<uint32_t>(from.head_dim_v));
    group->set_softmax_scale(from.softmax_scale);
    if (from.softcap != 0) group->set_softcap(from.softcap);
    if (from.window_left >= 0) group->set_window_left(static_cast<uint64_t>(from.window_left));
    group->set_non_causal(!from.causal);
    group->set_sinks(from.sinks.data(), from.sinks.size() * sizeof(float));
    group->set_storage(v1::KV_STORAGE_AS_DTYPE);
  }
  return to;
}

}  // namespace ringattn
