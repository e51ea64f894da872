// Flags of the score terms: --alibi, --bias, --mask, --segment_ids, --dropout.
#ifndef RINGATTN_CLIENT_CLI_TERM_FLAGS_H_
#define RINGATTN_CLIENT_CLI_TERM_FLAGS_H_

#include <string>

#include "absl/status/status.h"
#include "ringattn/v1/attention.pb.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace ringattn::client::cli {

// Where the forms of a bias and a mask, and slopes that are not geometric, come from.
enum class TermForms {
  kFromFile,   // the tensors' own shapes: --bias, --mask (attention_file.h reads them)
  kFromFlags,  // there is no file: --bias=one|heads|batch|both, --mask likewise
  kGenerated,  // as kFromFlags, and --alibi makes slopes for a file; no --dropout
};

class TermFlags {
 public:
  TermFlags() = default;
  TermFlags(const TermFlags&) = delete;  // the command refers to it
  TermFlags& operator=(const TermFlags&) = delete;
  void AddTo(CLI::App* command, TermForms forms);

  // Adds to `options`. Geometric slopes are of `num_heads`, where that is known (see
  // SetGeometricSlopes). Errors: a UsageError naming the flag.
  absl::Status Apply(v1::AttentionOptions* options) const;
  // --alibi=geometric was given.
  bool wants_geometric_slopes() const { return alibi_ == "geometric"; }
  // --alibi was given.
  bool has_alibi() const;

 private:
  TermForms forms_ = TermForms::kFromFile;
  CLI::Option* alibi_given_ = nullptr;
  std::string alibi_;
  bool has_bias_ = false;
  bool has_mask_ = false;
  std::string bias_;  // its form
  std::string bias_dtype_ = "input";
  std::string mask_;
  bool before_softcap_ = false;
  bool dbias_ = false;
  bool mask_bits_ = false;
  bool segment_ids_ = false;
  std::string dropout_;
};

// 2^(-8 (h + 1) / H) for each head.
void SetGeometricSlopes(uint32_t num_heads, v1::AttentionOptions* options);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_TERM_FLAGS_H_
