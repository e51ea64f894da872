#include "server/core/testing/scenario.h"

#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/core/testing/scenario_args.h"
#include "server/core/testing/scenario_driver.h"
#include "server/core/testing/scenario_views.h"

namespace ringattn::server {
namespace {

// Sets the limit that "KEY=VALUE" names; returns false for an unknown key.
bool SetConfig(const std::string& key, const std::string& value, CoordinatorConfig* config) {
  const auto number = [&value] { return std::atoi(value.c_str()); };
  if (key == "max_operations_per_worker") {
    config->max_operations_per_worker = number();
  } else if (key == "max_queued_requests") {
    config->limits.max_queued_requests = number();
  } else if (key == "max_queued_requests_per_client") {
    config->limits.max_queued_requests_per_client = number();
  } else if (key == "max_kv_caches") {
    config->limits.max_kv_caches = number();
  } else if (key == "assembly_time_max") {
    config->assembly_time_max = Duration(value);
  } else if (key == "loss_drain_timeout") {
    config->loss_drain_timeout = Duration(value);
  } else if (key == "preempt_after") {
    config->preempt_after = Duration(value);
  } else if (key == "run_time_floor") {
    config->run_time_floor = Duration(value);
  } else {
    return false;
  }
  return true;
}

CoordinatorConfig DefaultConfig() {
  CoordinatorConfig config;
  config.version = "1";
  config.assembly_time_max = absl::ZeroDuration();
  return config;
}

// The configuration of "scenario NAME KEY=VALUE..."; the error names an unknown key.
absl::StatusOr<CoordinatorConfig> ConfigOf(const Args& args) {
  CoordinatorConfig config = DefaultConfig();
  for (size_t i = 2; i < args.size(); ++i) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    if (!SetConfig(pair.first, pair.second, &config)) {
      return absl::InvalidArgumentError(
          absl::StrCat("scenario ", args[1], ": unknown configuration key ", pair.first));
    }
  }
  return config;
}

// Expands "repeat N COMMAND ; COMMAND ..." with % as the number, or returns the command alone.
std::vector<std::string> Expand(const std::string& command) {
  const Args args = absl::StrSplit(command, ' ', absl::SkipEmpty());
  if (args[0] != "repeat") return {command};
  std::vector<std::string> commands;
  for (int i = 1; i <= std::atoi(args[1].c_str()); ++i) {
    const std::string text = absl::StrReplaceAll(Rest(args, 2), {{"%", absl::StrCat(i)}});
    for (absl::string_view one : absl::StrSplit(text, " ; ")) commands.emplace_back(one);
  }
  return commands;
}

// The text before a comment.
std::string CommandIn(absl::string_view line) {
  return std::string(absl::StripAsciiWhitespace(line.substr(0, line.find('#'))));
}

// Writes a scenario with the traces that really occurred.
class Transcript {
 public:
  void Add(absl::string_view line) { absl::StrAppend(&text_, line, "\n"); }
  // Ends a block of commands; no effect without one.
  void EndBlock(const ScenarioLines& trace) {
    Add("----");
    for (const auto& [who, text] : trace) Add(absl::StrCat(who, who.empty() ? "" : ": ", text));
    Add("");
  }
  std::string Take() && {
    while (absl::EndsWith(text_, "\n\n")) text_.pop_back();
    return std::move(text_);
  }

 private:
  std::string text_;
};

}  // namespace

std::vector<ScenarioSection> SplitScenarios(const std::string& file) {
  std::vector<ScenarioSection> sections(1);
  std::vector<std::string> comments;  // directly above the next scenario
  for (absl::string_view line : absl::StrSplit(file, '\n')) {
    if (absl::StartsWith(line, "#")) {
      comments.emplace_back(line);
      continue;
    }
    if (absl::StartsWith(line, "scenario ")) {
      const Args args = absl::StrSplit(CommandIn(line), ' ', absl::SkipEmpty());
      sections.push_back({args.size() > 1 ? args[1] : "", ""});
    }
    for (const std::string& comment : comments)
      absl::StrAppend(&sections.back().text, comment, "\n");
    comments.clear();
    absl::StrAppend(&sections.back().text, line, "\n");
  }
  for (ScenarioSection& section : sections) {
    while (absl::EndsWith(section.text, "\n")) section.text.pop_back();
    if (!section.text.empty()) section.text += "\n";
  }
  return sections;
}

std::string JoinScenarios(const std::vector<ScenarioSection>& sections) {
  std::string file;
  for (const ScenarioSection& section : sections) {
    if (section.text.empty()) continue;
    absl::StrAppend(&file, file.empty() ? "" : "\n", section.text);
  }
  return file;
}

absl::StatusOr<std::string> RunScenario(const ScenarioSection& section) {
  std::optional<ScenarioDriver> scenario;
  Transcript transcript;
  bool in_trace = false;  // skips the old trace
  bool in_block = false;  // commands without a trace so far
  for (absl::string_view line : absl::StrSplit(section.text, '\n')) {
    if (in_trace || line == "----") {
      if (line == "----" && in_block) transcript.EndBlock({});
      in_block = false;
      in_trace = !line.empty();
      continue;
    }
    const std::string command = CommandIn(line);
    if (command.empty()) {
      if (line.empty() && in_block) transcript.EndBlock({});
      if (!line.empty()) transcript.Add(line);
      if (line.empty()) in_block = false;
      continue;
    }
    transcript.Add(line);
    if (absl::StartsWith(command, "scenario ")) {
      const absl::StatusOr<CoordinatorConfig> config =
          ConfigOf(absl::StrSplit(command, ' ', absl::SkipEmpty()));
      if (!config.ok()) return config.status();
      scenario.emplace(*config);
      continue;
    }
    if (!scenario.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat("\"", line, "\" precedes every scenario"));
    }
    ScenarioLines trace;
    for (const std::string& one : Expand(command)) {
      const ScenarioLines lines = scenario->Run(one);
      for (const auto& [who, text] : lines) {
        if (absl::StartsWith(text, "unknown ")) return absl::InvalidArgumentError(text);
      }
      trace.insert(trace.end(), lines.begin(), lines.end());
    }
    in_block = trace.empty();
    if (!trace.empty()) transcript.EndBlock(trace);
  }
  return std::move(transcript).Take();
}

}  // namespace ringattn::server
