#include "client/load/load_range.h"

#include <cmath>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ringattn::client::load {

absl::StatusOr<std::vector<double>> ParseLevels(absl::string_view text) {
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" ", why));
  };
  std::vector<double> numbers;
  for (absl::string_view part : absl::StrSplit(text, ':')) {
    double number;
    if (!absl::SimpleAtod(part, &number) || !std::isfinite(number)) {
      return wrong("is not START:END:STEP of numbers");
    }
    numbers.push_back(number);
  }
  if (numbers.size() > 3) return wrong("has more than three fields; expected START:END:STEP");
  const double start = numbers[0];
  const double end = numbers.size() > 1 ? numbers[1] : start;
  const double step = numbers.size() > 2 ? numbers[2] : 1;
  if (!(start > 0)) return wrong("must start above 0");
  if (end < start) return wrong("ends before it starts");
  if (!(step > 0)) return wrong("must have a step above 0");
  // Rounding must not lose the last level if the step is not a binary fraction.
  const double count = std::floor((end - start) / step * (1 + 1e-9) + 1e-9) + 1;
  if (count > kMaxLevels) return wrong(absl::StrCat("has more than ", kMaxLevels, " levels"));
  std::vector<double> levels;
  for (int i = 0; i < static_cast<int>(count); ++i) levels.push_back(start + i * step);
  return levels;
}

absl::StatusOr<std::vector<int>> ParseWholeLevels(absl::string_view text, int max) {
  const absl::StatusOr<std::vector<double>> levels = ParseLevels(text);
  if (!levels.ok()) return levels.status();
  std::vector<int> whole;
  for (double level : *levels) {
    if (level != std::floor(level) || level > max) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", text, "\" must have whole numbers up to ", max));
    }
    whole.push_back(static_cast<int>(level));
  }
  return whole;
}

}  // namespace ringattn::client::load
