// Presents a finished call: as JSON (docs/cli-json.md) or as a few lines of text.
// Tests: report_test.cc.
#ifndef RINGATTN_CLIENT_CLI_REPORT_H_
#define RINGATTN_CLIENT_CLI_REPORT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "client/api/call.h"
#include "client/cli/command.h"
#include "client/cli/flags.h"

namespace ringattn::client::cli {

// {"schedule": "ring", "layout": ..., "ranks": [...]}
Json PlanJson(const v1::PlanReport& plan);

// {"batch": 1, ..., "dtype": "bf16"}, with packing and output formats.
Json ShapeJson(const Problem& problem);
// The options that were set: AttentionOptions in protobuf's JSON, and dlse and probabilities, which
// are not fields of it.
Json OptionsJson(const Problem& problem);
// "with   causal, dropout\n"; empty without any.
std::string OptionsText(const Problem& problem);

// Everything about a call except its command and files.
Json CallJson(const Problem& problem, const CallReport& report);

// "forward by sm90/plain; probabilities by simt/terms". If members used different kernels for a
// call, each kernel is followed by its workers. CPU kernels include the instruction set. Empty if
// no rank reports kernels.
std::string KernelsText(const v1::Summary& summary);

// Lines, each with its newline.
std::string CallText(const CallReport& report);

// Returns a line that states the predicted time of a computation of over 10 s, otherwise "".
std::string PredictionText(const v1::Accepted& accepted);

// 1234567 -> "1.23 MB"; units are decimal.
std::string HumanBytes(double bytes);
// 1.5e9 -> "1.50 G"
std::string HumanRate(double per_second);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_REPORT_H_
