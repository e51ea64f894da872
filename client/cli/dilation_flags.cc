#include "client/cli/dilation_flags.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {

void DilationFlags::AddTo(FlagSet& command, const char* group) {
  command
      .Add("--dilation", &levels_,
           "Levels SEGMENT:RATE[:OFFSET][,...]: in each segment of SEGMENT tokens, every RATE-th "
           "token from OFFSET on attends to the others of these; default OFFSET: the head's "
           "number modulo RATE")
      .Group(group)
      .Delimiter(',');
  command
      .Add("--dilation_heads", &heads_,
           "all: every head has every level of --dilation; split: the levels share the heads")
      .Group(group)
      .OneOf({"all", "split"})
      .ShowDefault();
}

absl::Status DilationFlags::Apply(v1::AttentionOptions* options) const {
  if (levels_.empty() && wants_split()) return UsageError("--dilation_heads needs --dilation");
  for (const std::string& text : levels_) {
    const std::vector<std::string> parts = absl::StrSplit(text, ':');
    uint64_t numbers[3] = {};
    bool right = parts.size() == 2 || parts.size() == 3;
    for (size_t i = 0; right && i < parts.size(); ++i) {
      right = absl::SimpleAtoi(parts[i], &numbers[i]);
    }
    if (!right) {
      return UsageError(absl::StrCat("--dilation=", text, ": expected SEGMENT:RATE[:OFFSET]"));
    }
    if (parts.size() == 3 && wants_split()) {
      return UsageError(
          absl::StrCat("--dilation=", text,
                       ": OFFSET cannot be given with --dilation_heads=split, which sets it"));
    }
    v1::DilationLevel& level = *options->add_dilation_levels();
    level.set_segment_length(numbers[0]);
    level.set_dilation_rate(numbers[1]);
    if (parts.size() == 3) level.set_offset(numbers[2]);
  }
  return absl::OkStatus();
}

absl::Status SplitHeads(uint32_t num_heads, v1::AttentionOptions* options) {
  const auto levels = static_cast<uint32_t>(options->dilation_levels_size());
  if (num_heads < levels) {
    return UsageError(absl::StrCat("--dilation_heads=split: ", num_heads, " heads are too few for ",
                                   levels, " levels"));
  }
  uint32_t head = 0;
  for (uint32_t l = 0; l < levels; ++l) {
    v1::DilationLevel& level = *options->mutable_dilation_levels(static_cast<int>(l));
    level.set_head_begin(head);
    head += num_heads / levels + (l >= levels - num_heads % levels ? 1 : 0);
    level.set_head_end(head);
    // The server's rules reject a rate of 0.
    if (level.dilation_rate() > 0) level.set_offset(l % level.dilation_rate());
  }
  return absl::OkStatus();
}

}  // namespace ringattn::client::cli
