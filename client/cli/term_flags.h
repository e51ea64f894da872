// Flags of the score terms: --alibi, --bias, --mask, --segment_ids, --dropout.
#ifndef RINGATTN_CLIENT_CLI_TERM_FLAGS_H_
#define RINGATTN_CLIENT_CLI_TERM_FLAGS_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "client/cli/flag_set.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client::cli {

// The source of the shapes of bias and mask, and of slopes that are not geometric.
enum class TermForms {
  kFromFile,   // the tensors' own shapes: --bias, --mask (attention_file.h reads them)
  kFromFlags,  // no file: --bias=one|heads|batch|both, and the same for --mask
  kGenerated,  // as kFromFlags, and --alibi generates slopes for a file; no --dropout
};

class TermFlags {
 public:
  TermFlags() = default;
  TermFlags(const TermFlags&) = delete;  // the flag set refers to it
  TermFlags& operator=(const TermFlags&) = delete;
  void AddTo(FlagSet& command, TermForms forms);

  // Adds the terms to `options`, ALiBi without its slopes (see SetGeometricSlopes). Errors: a
  // UsageError naming the flag.
  absl::Status Apply(v1::AttentionOptions* options) const;
  // Returns true for --alibi=geometric.
  bool wants_geometric_slopes() const { return alibi_ == "geometric"; }
  // Returns true if --alibi was given.
  bool has_alibi() const;

 private:
  TermForms forms_ = TermForms::kFromFile;
  std::optional<Flag> alibi_given_;  // set by AddTo
  std::string alibi_;
  bool has_bias_ = false;
  bool has_mask_ = false;
  std::string bias_;  // its shape
  std::string bias_dtype_ = "input";
  std::string mask_;
  bool before_softcap_ = false;
  bool dbias_ = false;
  bool mask_bits_ = false;
  bool segment_ids_ = false;
  std::string dropout_;
};

// Sets the slope of head h of H to 2^(-8 (h + 1) / H).
void SetGeometricSlopes(uint32_t num_heads, v1::AttentionOptions* options);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_TERM_FLAGS_H_
