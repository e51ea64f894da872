#include "common/request/option_fields.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/attention/tensors.h"
#include "common/request/dilation_levels.h"
#include "common/request/enum_values.h"

namespace ringattn {
namespace {

using Proto = v1::AttentionOptions;
using Options = AttentionOptions;

// Kernels compute in fp32, so values that overflow or vanish in fp32 are out of range. The
// comparisons reject NaN.
void ReadSoftmaxScale(const Proto& from, const AttentionShape& shape, Options& to,
                      Violations& violations) {
  const double head_dim = static_cast<double>(std::max<int64_t>(shape.head_dim, 1));
  to.softmax_scale = from.has_softmax_scale() ? from.softmax_scale() : 1.0 / std::sqrt(head_dim);
  if (!(std::abs(to.softmax_scale) <= FLT_MAX)) {
    violations.Invalid("options.softmax_scale",
                       absl::StrCat("is ", from.softmax_scale(), ", must be finite in fp32"));
  }
}

void WriteSoftmaxScale(const Options& from, Proto& to) { to.set_softmax_scale(from.softmax_scale); }

void ReadSoftcap(const Proto& from, const AttentionShape&, Options& to, Violations& violations) {
  if (!from.has_softcap()) return;
  to.softcap = from.softcap();
  if (!(to.softcap >= FLT_MIN && to.softcap <= FLT_MAX)) {
    violations.Invalid(
        "options.softcap",
        absl::StrCat("is ", from.softcap(), ", must be finite and greater than 0 in fp32"));
  }
}

void WriteSoftcap(const Options& from, Proto& to) {
  if (from.softcap != 0) to.set_softcap(from.softcap);
}

void ReadCausal(const Proto& from, const AttentionShape&, Options& to, Violations&) {
  to.causal = from.causal();
}

void WriteCausal(const Options& from, Proto& to) { to.set_causal(from.causal); }

void ReadWindow(const Proto& from, const AttentionShape&, Options& to, Violations& violations) {
  if (!from.has_window()) return;
  to.window_left = from.window().left();
  to.window_right = from.window().right();
  const auto check = [&](const char* field, int64_t side) {
    if (side >= -1) return;
    violations.Invalid(field, absl::StrCat("is ", side, ", must be at least -1"));
  };
  check("options.window.left", to.window_left);
  check("options.window.right", to.window_right);
}

void WriteWindow(const Options& from, Proto& to) {
  if (from.window_left < 0 && from.window_right < 0) return;
  to.mutable_window()->set_left(from.window_left);
  to.mutable_window()->set_right(from.window_right);
}

void ReadSinks(const Proto& from, const AttentionShape&, Options& to, Violations&) {
  to.sinks = from.has_sinks();
}

void WriteSinks(const Options& from, Proto& to) {
  if (from.sinks) to.mutable_sinks();
}

// --- score terms

// Returns the rows that dropout and ALiBi distinguish: batch rows, or documents.
int64_t BatchRows(const AttentionShape& shape) {
  return std::max<int64_t>(shape.packed ? shape.num_documents() : shape.batch, 0);
}

void ReadDropout(const Proto& from, const AttentionShape& shape, Options& to,
                 Violations& violations) {
  if (!from.has_dropout()) return;
  const v1::Dropout& dropout = from.dropout();
  if (!(dropout.rate() >= 0 && dropout.rate() < 1)) {
    violations.Invalid("options.dropout.rate",
                       absl::StrCat("is ", dropout.rate(), ", must be at least 0 and less than 1"));
    return;
  }
  const double threshold = std::round(dropout.rate() * 65536);
  if (threshold >= 65536) {
    violations.Invalid("options.dropout.rate", "is nearer to 1 than to 65535/65536");
    return;
  }
  DropoutForm& form = to.dropout;
  const int64_t batch_rows = BatchRows(shape);
  const auto origin = [&](const char* field, uint64_t first, int64_t size, uint32_t& target) {
    constexpr uint64_t kEnd = uint64_t{1} << 32;
    target = static_cast<uint32_t>(first);
    if (first < kEnd && (size < 0 || first + static_cast<uint64_t>(size) <= kEnd)) return;
    violations.Invalid(absl::StrCat("options.dropout.", field),
                       absl::StrCat("is ", first, ", with the request's size beyond 2^32"));
  };
  origin("first_batch", dropout.first_batch(), batch_rows, form.first_batch);
  origin("first_head", dropout.first_head(), shape.num_heads, form.first_head);
  origin("first_query", dropout.first_query(), shape.seq_len_q, form.first_query);
  origin("first_key", dropout.first_key(), shape.seq_len_kv, form.first_key);
  form.threshold = static_cast<uint32_t>(threshold);
  form.seed = dropout.seed();
  if (form.threshold == 0) form = DropoutForm();  // no pair is dropped
}

void WriteDropout(const Options& from, Proto& to) {
  const DropoutForm& form = from.dropout;
  if (form.threshold == 0) return;
  v1::Dropout& dropout = *to.mutable_dropout();
  dropout.set_rate(form.threshold / 65536.0);
  dropout.set_seed(form.seed);
  dropout.set_first_batch(form.first_batch);
  dropout.set_first_head(form.first_head);
  dropout.set_first_query(form.first_query);
  dropout.set_first_key(form.first_key);
}

constexpr int64_t kMaxSlopes = 65536;

void ReadAlibi(const Proto& from, const AttentionShape& shape, Options& to,
               Violations& violations) {
  if (!from.has_alibi()) return;
  const auto& slopes = from.alibi().slopes();
  const int64_t count = slopes.size();
  const int64_t batch_rows = BatchRows(shape);
  if (count > kMaxSlopes) {
    violations.OverLimit("options.alibi.slopes", absl::StrCat("has ", count, " entries, at most ",
                                                              kMaxSlopes, " are allowed"));
    return;
  }
  if (count == 0 ||
      (count != shape.num_heads && count != SaturatingProduct({batch_rows, shape.num_heads}))) {
    violations.Invalid("options.alibi.slopes",
                       absl::StrCat("has ", count, " entries, must have one for each of ",
                                    shape.num_heads, " heads, or that for each of ", batch_rows,
                                    shape.packed ? " documents" : " batch rows"));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float slope = slopes[static_cast<int>(i)];
    if (std::isfinite(slope)) continue;
    violations.Invalid(absl::StrCat("options.alibi.slopes[", i, "]"),
                       absl::StrCat("is ", slope, ", must be finite"));
    return;
  }
  to.alibi_slopes.assign(slopes.begin(), slopes.end());
}

void WriteAlibi(const Options& from, Proto& to) {
  if (from.alibi_slopes.empty()) return;
  to.mutable_alibi()->mutable_slopes()->Add(from.alibi_slopes.begin(), from.alibi_slopes.end());
}

void ReadBias(const Proto& from, const AttentionShape&, Options& to, Violations&) {
  if (!from.has_bias()) return;
  const v1::Bias& bias = from.bias();
  // Any other dtype must be the request's (validation.cc).
  const bool float32 = bias.has_dtype() && bias.dtype() == v1::DATA_TYPE_FLOAT32;
  to.bias =
      BiasForm{bias.per_batch(), bias.per_head(), float32, bias.before_softcap(), bias.gradient()};
}

void WriteBias(const Options& from, Proto& to) {
  if (!from.bias.has_value()) return;
  v1::Bias& bias = *to.mutable_bias();
  bias.set_per_batch(from.bias->per_batch);
  bias.set_per_head(from.bias->per_head);
  if (from.bias->float32) bias.set_dtype(v1::DATA_TYPE_FLOAT32);
  bias.set_before_softcap(from.bias->before_softcap);
  bias.set_gradient(from.bias->gradient);
}

void ReadMask(const Proto& from, const AttentionShape&, Options& to, Violations& violations) {
  if (!from.has_mask()) return;
  const v1::Mask& mask = from.mask();
  if (!v1::MaskEncoding_IsValid(mask.encoding())) {
    violations.Invalid("options.mask.encoding", OtherThan<v1::MaskEncoding>(mask.encoding()));
  }
  to.mask = MaskForm{mask.per_batch(), mask.per_head(), mask.encoding() == v1::MASK_ENCODING_BITS};
}

void WriteMask(const Options& from, Proto& to) {
  if (!from.mask.has_value()) return;
  v1::Mask& mask = *to.mutable_mask();
  mask.set_per_batch(from.mask->per_batch);
  mask.set_per_head(from.mask->per_head);
  mask.set_encoding(from.mask->bits ? v1::MASK_ENCODING_BITS : v1::MASK_ENCODING_BYTES);
}

void ReadSegmentIds(const Proto& from, const AttentionShape&, Options& to, Violations&) {
  to.segment_ids = from.has_segment_ids();
}

void WriteSegmentIds(const Options& from, Proto& to) {
  if (from.segment_ids) to.mutable_segment_ids();
}

void ReadDeterministic(const Proto& from, const AttentionShape&, Options& to,
                       Violations& violations) {
  if (!v1::Determinism_IsValid(from.deterministic())) {
    violations.Invalid("options.deterministic", OtherThan<v1::Determinism>(from.deterministic()));
  }
  to.deterministic = from.deterministic() == v1::DETERMINISM_SAME_RING;
}

void WriteDeterministic(const Options& from, Proto& to) {
  if (from.deterministic) to.set_deterministic(v1::DETERMINISM_SAME_RING);
}

void ReadComputeDType(const Proto& from, const AttentionShape&, Options& to,
                      Violations& violations) {
  if (!v1::ComputeDtype_IsValid(from.compute_dtype())) {
    violations.Invalid("options.compute_dtype", OtherThan<v1::ComputeDtype>(from.compute_dtype()));
  }
  if (from.compute_dtype() == v1::COMPUTE_DTYPE_FLOAT8_E4M3) {
    to.compute_dtype = ComputeDType::kFloat8E4M3;
  }
}

void WriteComputeDType(const Options& from, Proto& to) {
  if (from.compute_dtype == ComputeDType::kFloat8E4M3) {
    to.set_compute_dtype(v1::COMPUTE_DTYPE_FLOAT8_E4M3);
  }
}

constexpr OptionField kFields[] = {
    {"softmax_scale", ReadSoftmaxScale, WriteSoftmaxScale},
    {"softcap", ReadSoftcap, WriteSoftcap},
    {"causal", ReadCausal, WriteCausal},
    {"window", ReadWindow, WriteWindow},
    {"dropout", ReadDropout, WriteDropout,
     [](const Options& options) { return options.dropout.threshold != 0; }},
    {"alibi", ReadAlibi, WriteAlibi,
     [](const Options& options) { return !options.alibi_slopes.empty(); }},
    {"bias", ReadBias, WriteBias, [](const Options& options) { return options.bias.has_value(); }},
    {"mask", ReadMask, WriteMask, [](const Options& options) { return options.mask.has_value(); }},
    {"segment_ids", ReadSegmentIds, WriteSegmentIds,
     [](const Options& options) { return options.segment_ids; }},
    {"sinks", ReadSinks, WriteSinks},
    {"dilation_levels", ReadDilationLevels, WriteDilationLevels,
     [](const Options& options) { return !options.dilation_levels.empty(); }},
    {"deterministic", ReadDeterministic, WriteDeterministic,
     [](const Options& options) { return options.deterministic; }},
    {"compute_dtype", ReadComputeDType, WriteComputeDType,
     [](const Options& options) { return options.compute_dtype != ComputeDType::kAsInputs; }},
};

}  // namespace

absl::Span<const OptionField> OptionFields() { return kFields; }

AttentionOptions ReadOptions(const v1::AttentionOptions& proto, const AttentionShape& shape,
                             Violations& violations) {
  AttentionOptions options;
  for (const OptionField& field : kFields) {
    field.read(proto, shape, options, violations);
  }
  return options;
}

void WriteOptions(const AttentionOptions& options, v1::AttentionOptions* proto) {
  for (const OptionField& field : kFields) field.write(options, *proto);
}

std::vector<std::string> DeviceOptions() {
  std::vector<std::string> names;
  for (const OptionField& field : kFields) {
    if (field.of_device != nullptr) names.push_back(field.name);
  }
  return names;
}

std::vector<std::string> DeviceOptionsOf(const AttentionOptions& options) {
  std::vector<std::string> names;
  for (const OptionField& field : kFields) {
    if (field.of_device != nullptr && field.of_device(options)) names.push_back(field.name);
  }
  return names;
}

std::vector<std::string> DeviceFieldsOf(const AttentionSpec& spec) {
  std::vector<std::string> fields = DeviceOptionsOf(spec.options);
  if (!spec.probability_rows.empty()) fields.push_back(kProbabilityRowsField);
  return fields;
}

std::vector<std::string> ServedOptions() {
  std::vector<std::string> names;
  for (const OptionField& field : kFields) names.push_back(field.name);
  return names;
}

}  // namespace ringattn
