#include "common/process/size_flag.h"

#include <cmath>

#include "CLI/App.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ringattn {

std::optional<int64_t> ParseSize(absl::string_view text) {
  constexpr int64_t kMost = int64_t{1} << 62;
  const size_t digits = text.find_first_not_of("0123456789.");
  const absl::string_view number = text.substr(0, digits);
  std::string unit =
      digits == absl::string_view::npos
          ? ""
          : absl::AsciiStrToLower(absl::StripLeadingAsciiWhitespace(text.substr(digits)));
  absl::string_view letters = unit;
  absl::ConsumeSuffix(&letters, "b");
  const bool is_binary = absl::ConsumeSuffix(&letters, "i");
  double factor = 1;
  if (letters.size() == 1) {
    const size_t power = absl::string_view("kmgt").find(letters[0]);
    if (power == absl::string_view::npos) return std::nullopt;
    factor = std::ldexp(1.0, 10 * static_cast<int>(power + 1));
  } else if (!letters.empty() || is_binary) {
    return std::nullopt;
  }
  // Integers beyond 2^53 are not rounded.
  if (int64_t whole = 0; factor == 1 && absl::SimpleAtoi(number, &whole)) {
    return whole <= kMost ? std::optional(whole) : std::nullopt;
  }
  double value = 0;
  if (number.empty() || !absl::SimpleAtod(number, &value)) return std::nullopt;
  value *= factor;
  if (!(value <= static_cast<double>(kMost))) return std::nullopt;
  return static_cast<int64_t>(value);
}

CLI::Option* AddSize(CLI::App* app, const std::string& name, int64_t* target, int64_t min,
                     int64_t max, const std::string& help) {
  return app
      ->add_option_function<std::string>(
          name,
          [name, target, min, max](const std::string& text) {
            const std::optional<int64_t> value = ParseSize(text);
            if (!value.has_value()) {
              throw CLI::ValidationError(
                  name, absl::StrCat(text, " is not a size, such as 1000000, 512MiB or 4GiB"));
            }
            if (*value < min || *value > max) {
              throw CLI::ValidationError(name, absl::StrCat(text, " is outside the range of ", min,
                                                            " to ", max, " bytes"));
            }
            *target = *value;
          },
          help)
      ->type_name("BYTES");
}

}  // namespace ringattn
