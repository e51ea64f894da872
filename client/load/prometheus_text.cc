#include "client/load/prometheus_text.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ringattn::client::load {
namespace {

// Takes a quoted value with \\, \" and \n from the front of `rest`.
bool TakeQuoted(absl::string_view* rest, std::string* value) {
  if (rest->empty() || rest->front() != '"') return false;
  rest->remove_prefix(1);
  while (!rest->empty() && rest->front() != '"') {
    char letter = rest->front();
    rest->remove_prefix(1);
    if (letter == '\\') {
      if (rest->empty()) return false;
      letter = rest->front() == 'n' ? '\n' : rest->front();
      rest->remove_prefix(1);
    }
    *value += letter;
  }
  if (rest->empty()) return false;
  rest->remove_prefix(1);
  return true;
}

// Takes "{a="x",b="y"}", if it is there, from the front of `rest`.
bool TakeLabels(absl::string_view* rest, std::map<std::string, std::string>* labels) {
  if (rest->empty() || rest->front() != '{') return true;
  rest->remove_prefix(1);
  while (!rest->empty() && rest->front() != '}') {
    const size_t equals = rest->find('=');
    if (equals == absl::string_view::npos) return false;
    const std::string name(absl::StripAsciiWhitespace(rest->substr(0, equals)));
    rest->remove_prefix(equals + 1);
    if (name.empty() || !TakeQuoted(rest, &(*labels)[name])) return false;
    *rest = absl::StripLeadingAsciiWhitespace(*rest);
    if (!rest->empty() && rest->front() == ',') rest->remove_prefix(1);
    *rest = absl::StripLeadingAsciiWhitespace(*rest);
  }
  if (rest->empty()) return false;
  rest->remove_prefix(1);
  return true;
}

bool ParseLine(absl::string_view line, MetricSample* sample) {
  const size_t end = line.find_first_of("{ \t");
  if (end == 0 || end == absl::string_view::npos) return false;
  sample->name = std::string(line.substr(0, end));
  line.remove_prefix(end);
  line = absl::StripLeadingAsciiWhitespace(line);
  if (!TakeLabels(&line, &sample->labels)) return false;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  // A value, and optionally a timestamp.
  return (fields.size() == 1 || fields.size() == 2) && absl::SimpleAtod(fields[0], &sample->value);
}

}  // namespace

absl::StatusOr<std::vector<MetricSample>> ParsePrometheusText(absl::string_view text) {
  std::vector<MetricSample> samples;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    MetricSample sample;
    if (!ParseLine(line, &sample)) {
      return absl::InvalidArgumentError(absl::StrCat("is not Prometheus' text format: \"",
                                                     absl::CHexEscape(line.substr(0, 60)), "\""));
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace ringattn::client::load
