#include "client/cli/term_flags.h"

#include <cmath>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {
namespace {

constexpr char kComputedGroup[] = "What is computed";
constexpr char kFormHelp[] =
    "one: the same for all; heads: per query head; batch: per batch element; both";

Flag AddForm(FlagSet& command, const char* name, std::string* form, const char* help) {
  return command.Add(name, form, absl::StrCat(help, ": ", kFormHelp))
      .Group(kComputedGroup)
      .OneOf({"one", "heads", "batch", "both"});
}

template <typename Form>
void SetForm(const std::string& name, Form* form) {
  form->set_per_batch(name == "batch" || name == "both");
  form->set_per_head(name == "heads" || name == "both");
}

absl::Status ParseDropout(const std::string& text, v1::Dropout* dropout) {
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  double rate;
  uint64_t seed;
  if (parts.size() != 2 || !absl::SimpleAtod(parts[0], &rate) ||
      !absl::SimpleAtoi(parts[1], &seed)) {
    return UsageError(absl::StrCat("--dropout=", text, ": expected RATE,SEED"));
  }
  dropout->set_rate(rate);
  dropout->set_seed(seed);
  return absl::OkStatus();
}

}  // namespace

void TermFlags::AddTo(FlagSet& command, TermForms forms) {
  forms_ = forms;
  const bool from_file = forms == TermForms::kFromFile;
  alibi_given_ = command
                     .Add("--alibi", &alibi_,
                          forms == TermForms::kGenerated
                              ? "Also tensor alibi_slopes, one per query head, for --alibi of the "
                                "other commands"
                              : "Subtract slope * distance from scores. --alibi=geometric: slopes "
                                "2^(-8 (h + 1) / "
                                "heads)" +
                                    std::string(from_file ? "; --alibi: tensor alibi_slopes" : ""))
                     .Group(kComputedGroup)
                     .OptionalValue()
                     .OneOf({"", "geometric"});
  if (from_file) {
    command
        .Add("--bias", &has_bias_,
             "Add tensor bias to the scores; its shape determines along which axes it varies")
        .Group(kComputedGroup);
    command
        .Add("--mask", &has_mask_, "Tensor mask selects the visible pairs; its shape as for --bias")
        .Group(kComputedGroup);
  } else {
    AddForm(command, "--bias", &bias_, "Add a bias to the scores");
    command
        .Add("--bias_dtype", &bias_dtype_,
             "Type of the bias and its gradient: the input's dtype, or fp32")
        .Group(kComputedGroup)
        .OneOf({"input", "fp32"})
        .ShowDefault();
    AddForm(command, "--mask", &mask_, "A mask that selects the visible pairs");
  }
  command.Add("--mask_bits", &mask_bits_, "The mask has eight keys per byte, lowest bit first")
      .Group(kComputedGroup);
  command
      .Add("--segment_ids", &segment_ids_,
           "Queries attend to keys with equal ids: tensors q_segment_ids, kv_segment_ids")
      .Group(kComputedGroup);
  if (forms == TermForms::kGenerated) return;
  command.Add("--bias_before_softcap", &before_softcap_, "Add the bias before the softcap")
      .Group(kComputedGroup);
  command.Add("--dbias", &dbias_, "Backward also returns tensor dbias, the gradient of the bias")
      .Group(kComputedGroup);
  command
      .Add("--dropout", &dropout_,
           "RATE,SEED: drop weights at this rate; the result does not depend on the ring")
      .Group(kComputedGroup);
}

bool TermFlags::has_alibi() const { return alibi_given_->count() > 0; }

absl::Status TermFlags::Apply(v1::AttentionOptions* options) const {
  const bool from_file = forms_ == TermForms::kFromFile;
  const bool has_bias = from_file ? has_bias_ : !bias_.empty();
  const bool has_mask = from_file ? has_mask_ : !mask_.empty();
  if (has_alibi() && forms_ == TermForms::kFromFlags && alibi_.empty()) {
    return UsageError(
        "--alibi needs a value here, because the command reads no file: --alibi=geometric");
  }
  if (!has_bias && before_softcap_) return UsageError("--bias_before_softcap needs --bias");
  if (!has_bias && dbias_) return UsageError("--dbias needs --bias");
  if (!has_bias && bias_dtype_ == "fp32") return UsageError("--bias_dtype needs --bias");
  if (!has_mask && mask_bits_) return UsageError("--mask_bits needs --mask");
  if (has_bias) {
    SetForm(bias_, options->mutable_bias());
    options->mutable_bias()->set_before_softcap(before_softcap_);
    options->mutable_bias()->set_gradient(dbias_);
    if (bias_dtype_ == "fp32") options->mutable_bias()->set_dtype(v1::DATA_TYPE_FLOAT32);
  }
  if (has_mask) {
    SetForm(mask_, options->mutable_mask());
    options->mutable_mask()->set_encoding(mask_bits_ ? v1::MASK_ENCODING_BITS
                                                     : v1::MASK_ENCODING_BYTES);
  }
  if (segment_ids_) options->mutable_segment_ids();
  if (has_alibi()) options->mutable_alibi();  // slopes follow once the shape is known
  if (dropout_.empty()) return absl::OkStatus();
  return ParseDropout(dropout_, options->mutable_dropout());
}

void SetGeometricSlopes(uint32_t num_heads, v1::AttentionOptions* options) {
  options->mutable_alibi()->clear_slopes();
  for (uint32_t h = 0; h < num_heads; ++h) {
    options->mutable_alibi()->add_slopes(static_cast<float>(std::exp2(-8.0 * (h + 1) / num_heads)));
  }
}

}  // namespace ringattn::client::cli
