// The flags --dilation and --dilation_heads.
// Tests: flags_test.cc.
#ifndef RINGATTN_CLIENT_CLI_DILATION_FLAGS_H_
#define RINGATTN_CLIENT_CLI_DILATION_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/flag_set.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client::cli {

class DilationFlags {
 public:
  DilationFlags() = default;
  DilationFlags(const DilationFlags&) = delete;  // the flag set refers to it
  DilationFlags& operator=(const DilationFlags&) = delete;
  void AddTo(FlagSet& command, const char* group);

  // Adds the levels to `options`. Errors: a UsageError naming the flag.
  absl::Status Apply(v1::AttentionOptions* options) const;
  // Returns true for --dilation_heads=split; the levels then need SplitHeads.
  bool wants_split() const { return heads_ == "split"; }

 private:
  std::vector<std::string> levels_;
  std::string heads_ = "all";
};

// Distributes the heads over the levels as evenly as possible; later levels get the remainder. The
// offset of level l is l modulo its rate. Errors: a UsageError for fewer heads than levels.
absl::Status SplitHeads(uint32_t num_heads, v1::AttentionOptions* options);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_DILATION_FLAGS_H_
