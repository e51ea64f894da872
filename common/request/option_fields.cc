#include "common/request/option_fields.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

using Proto = v1::AttentionOptions;
using Options = AttentionOptions;

// Kernels work in fp32: what overflows or vanishes there is out of range. The comparisons
// are written so that NaN fails.
void ReadSoftmaxScale(const Proto& from, const AttentionShape& shape, Options& to,
                      Violations& violations) {
  const double head_dim = static_cast<double>(std::max<int64_t>(shape.head_dim, 1));
  to.softmax_scale = from.has_softmax_scale() ? from.softmax_scale() : 1.0 / std::sqrt(head_dim);
  if (!(std::abs(to.softmax_scale) <= FLT_MAX)) {
    violations.Invalid("options.softmax_scale", "must be finite in fp32");
  }
}

void WriteSoftmaxScale(const Options& from, Proto& to) { to.set_softmax_scale(from.softmax_scale); }

void ReadSoftcap(const Proto& from, const AttentionShape&, Options& to, Violations& violations) {
  if (!from.has_softcap()) return;
  to.softcap = from.softcap();
  if (!(to.softcap >= FLT_MIN && to.softcap <= FLT_MAX)) {
    violations.Invalid("options.softcap", "must be finite and greater than 0 in fp32");
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

constexpr OptionField kFields[] = {
    {"softmax_scale", ReadSoftmaxScale, WriteSoftmaxScale},
    {"softcap", ReadSoftcap, WriteSoftcap},
    {"causal", ReadCausal, WriteCausal},
    {"window", ReadWindow, WriteWindow},
    {"dropout", nullptr, nullptr},
    {"alibi", nullptr, nullptr},
    {"bias", nullptr, nullptr},
    {"mask", nullptr, nullptr},
    {"segment_ids", nullptr, nullptr},
    {"sinks", ReadSinks, WriteSinks},
    {"dilation_levels", nullptr, nullptr},
    {"deterministic", nullptr, nullptr},
};

bool IsSet(const Proto& proto, const char* name) {
  const auto* field = proto.GetDescriptor()->FindFieldByName(name);
  const auto& reflection = *proto.GetReflection();
  return field->is_repeated() ? reflection.FieldSize(proto, field) > 0
                              : reflection.HasField(proto, field);
}

}  // namespace

absl::Span<const OptionField> OptionFields() { return kFields; }

AttentionOptions ReadOptions(const v1::AttentionOptions& proto, const AttentionShape& shape,
                             Violations& violations) {
  AttentionOptions options;
  for (const OptionField& field : kFields) {
    if (field.read != nullptr) {
      field.read(proto, shape, options, violations);
    } else if (IsSet(proto, field.name)) {
      violations.Unserved(absl::StrCat("options.", field.name));
    }
  }
  return options;
}

void WriteOptions(const AttentionOptions& options, v1::AttentionOptions* proto) {
  for (const OptionField& field : kFields) {
    if (field.write != nullptr) field.write(options, *proto);
  }
}

std::vector<std::string> ServedOptions() {
  std::vector<std::string> names;
  for (const OptionField& field : kFields) {
    if (field.read != nullptr) names.push_back(field.name);
  }
  return names;
}

}  // namespace ringattn
