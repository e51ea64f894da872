// --dilation, --dilation_heads.
#ifndef RINGATTN_CLIENT_CLI_DILATION_FLAGS_H_
#define RINGATTN_CLIENT_CLI_DILATION_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ringattn/v1/attention.pb.h"

namespace CLI {
class App;
}

namespace ringattn::client::cli {

class DilationFlags {
 public:
  DilationFlags() = default;
  DilationFlags(const DilationFlags&) = delete;  // the command refers to it
  DilationFlags& operator=(const DilationFlags&) = delete;
  void AddTo(CLI::App* command, const char* group);

  // Adds the levels to `options`. Errors: a UsageError naming the flag.
  absl::Status Apply(v1::AttentionOptions* options) const;
  // --dilation_heads=split was given: the levels still need SplitHeads.
  bool wants_split() const { return heads_ == "split"; }

 private:
  std::vector<std::string> levels_;
  std::string heads_ = "all";
};

// Deals the heads out to the levels, as evenly as possible, the later ones having those that are
// left over; the offset of level l is l modulo its rate. Errors: a UsageError for fewer heads than
// levels.
absl::Status SplitHeads(uint32_t num_heads, v1::AttentionOptions* options);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_DILATION_FLAGS_H_
