#include "client/cli/flag_set.h"

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/process/command_arguments.h"

namespace ringattn::client::cli {
namespace {

// CLI11's ranges accept NaN.
std::string CheckFinite(const std::string& text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || std::isfinite(value)) return "";
  return absl::StrCat("is ", text, ", must be a finite number");
}

std::string CheckNotNegative(const std::string& text) {
  return absl::StartsWith(text, "-") ? absl::StrCat("is ", text, "; must not be negative") : "";
}

// Replaces a duration by its milliseconds, which a number states already.
std::string ToMilliseconds(std::string& text) {
  double number = 0;
  if (absl::SimpleAtod(text, &number)) return "";
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) {
    return absl::StrCat("is ", text, "; must be a duration like 50ms, or a number of milliseconds");
  }
  text = absl::StrFormat("%.17g", absl::ToDoubleMilliseconds(duration));
  return "";
}

template <typename T>
constexpr bool kIsReal = std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>;

// The type of one value of a flag: of an optional, or of an element of a list.
template <typename T>
struct ValueType {
  using type = T;
};
template <typename T>
struct ValueType<std::optional<T>> {
  using type = T;
};
template <typename T>
struct ValueType<std::vector<T>> {
  using type = T;
};

// CLI11's own error does not state what a flag accepts, and some versions parse -1 as 2^64 - 1.
template <typename T>
std::string CheckKind(std::string text) {
  using Value = typename ValueType<T>::type;
  const std::string given = text;
  constexpr bool kIsBool = std::is_same_v<Value, bool>;
  if (std::is_unsigned_v<Value> && !kIsBool && absl::StartsWith(given, "-")) {
    return CheckNotNegative(given);
  }
  if (given.empty() || CLI::TypeValidator<Value>("")(text).empty()) return "";
  const char* kind = "a whole number";
  if constexpr (kIsBool) {
    kind = "true or false";
  } else if constexpr (std::is_floating_point_v<Value>) {
    kind = "a number";
  }
  return absl::StrCat("is ", given, ", must be ", kind);
}

template <typename T>
void AddChecks(CLI::Option* option) {
  if constexpr (!std::is_same_v<typename ValueType<T>::type, std::string>) {
    option->check(CLI::Validator(CheckKind<T>, ""));
  }
  if constexpr (kIsReal<T>) option->check(CLI::Validator(CheckFinite, ""));
}

// Returns what is wrong with the command's name; empty if a command was chosen.
std::string CheckCommand(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  if (!chosen.empty()) return CheckCommand(*chosen.front());
  if (app.get_require_subcommand_min() == 0) return "";
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  const std::vector<std::string> arguments = app.remaining();
  const bool is_named = !arguments.empty() && !absl::StartsWith(arguments.front(), "-");
  return absl::StrCat(
      is_named ? absl::StrCat(arguments.front(), " is not a command") : "no command is given",
      "; use one of ", absl::StrJoin(names, ", "));
}

}  // namespace

Flag Flag::Group(const std::string& title) const {
  option_->group(title);
  return *this;
}

Flag Flag::ShowDefault() const {
  option_->capture_default_str();
  return *this;
}

Flag Flag::ValueName(const std::string& name) const {
  option_->type_name(name);
  return *this;
}

Flag Flag::Required() const {
  option_->required();
  return *this;
}

Flag Flag::Needs(const Flag& other) const {
  option_->needs(other.option_);
  return *this;
}

Flag Flag::Excludes(const Flag& other) const {
  option_->excludes(other.option_);
  return *this;
}

Flag Flag::Delimiter(char delimiter) const {
  option_->delimiter(delimiter);
  return *this;
}

Flag Flag::OptionalValue() const {
  option_->expected(0, 1);
  return *this;
}

Flag Flag::OneOf(const std::vector<std::string>& values) const {
  option_->check(CLI::IsMember(values));
  return *this;
}

Flag Flag::InRange(int min, int max) const {
  option_->check(CLI::Range(min, max));
  return *this;
}

Flag Flag::InRange(double min, double max) const {
  option_->check(CLI::Range(min, max));
  return *this;
}

Flag Flag::Positive() const {
  option_->check(CLI::PositiveNumber);
  return *this;
}

// CLI11's own check names the largest double as the bound.
Flag Flag::NotNegative() const {
  option_->check(CLI::Validator(CheckNotNegative, ""));
  return *this;
}

Flag Flag::AsSize() const {
  option_->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  return *this;
}

Flag Flag::AsMilliseconds() const {
  option_->transform(CLI::Validator(ToMilliseconds, ""));
  return *this;
}

size_t Flag::count() const { return option_->count(); }

FlagSet::FlagSet(const std::string& name, const std::string& help, const std::string& version)
    : owned_(std::make_unique<CLI::App>(help, name)), app_(owned_.get()) {
  constexpr size_t kHelpColumn = 36;
  app_->require_subcommand(1);
  app_->set_version_flag("--version", version);
  app_->get_formatter()->column_width(kHelpColumn);
}

FlagSet::FlagSet() : owned_(std::make_unique<CLI::App>()), app_(owned_.get()) {}

FlagSet::FlagSet(CLI::App* command) : app_(command) {}

FlagSet::~FlagSet() = default;

FlagSet& FlagSet::AddCommand(const std::string& name, const std::string& help) {
  commands_.emplace_back(new FlagSet(app_->add_subcommand(name, help)));
  return *commands_.back();
}

void FlagSet::RequireCommand() { app_->require_subcommand(1); }

void FlagSet::OnChosen(std::function<void()> on_chosen) { app_->callback(std::move(on_chosen)); }

template <typename T>
Flag FlagSet::Add(const std::string& names, T* value, const std::string& help) {
  if constexpr (std::is_same_v<T, bool>) {
    CLI::Option* option = app_->add_flag(names, *value, help);
    AddChecks<T>(option);
    return Flag(option);
  } else {
    CLI::Option* option = app_->add_option(names, *value, help);
    AddChecks<T>(option);
    return Flag(option);
  }
}

template Flag FlagSet::Add(const std::string&, bool*, const std::string&);
template Flag FlagSet::Add(const std::string&, int*, const std::string&);
template Flag FlagSet::Add(const std::string&, int64_t*, const std::string&);
template Flag FlagSet::Add(const std::string&, uint32_t*, const std::string&);
template Flag FlagSet::Add(const std::string&, uint64_t*, const std::string&);
template Flag FlagSet::Add(const std::string&, double*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::string*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::optional<int>*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::optional<double>*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::optional<uint32_t>*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::optional<uint64_t>*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::vector<std::string>*, const std::string&);
template Flag FlagSet::Add(const std::string&, std::vector<uint64_t>*, const std::string&);

template <typename T>
Flag FlagSet::AddFunction(const std::string& name, std::function<absl::Status(const T&)> set,
                          const std::string& help) {
  const auto checked = [name, set = std::move(set)](const T& value) {
    if (absl::Status status = set(value); !status.ok()) {
      throw CLI::ValidationError(name, std::string(status.message()));
    }
  };
  CLI::Option* option = app_->add_option_function<T>(name, checked, help);
  AddChecks<T>(option);
  return Flag(option);
}

template Flag FlagSet::AddFunction(const std::string&,
                                   std::function<absl::Status(const std::string&)>,
                                   const std::string&);
template Flag FlagSet::AddFunction(const std::string&, std::function<absl::Status(const double&)>,
                                   const std::string&);
template Flag FlagSet::AddFunction(const std::string&, std::function<absl::Status(const uint32_t&)>,
                                   const std::string&);
template Flag FlagSet::AddFunction(const std::string&,
                                   std::function<absl::Status(const std::vector<std::string>&)>,
                                   const std::string&);

Flag FlagSet::AddSwitch(const std::string& name, std::function<void()> set,
                        const std::string& help) {
  CLI::Option* option = app_->add_flag_callback(name, std::move(set), help);
  AddChecks<bool>(option);
  return Flag(option);
}

std::optional<int> FlagSet::Parse(int argc, char** argv) {
  try {
    ParseArguments(app_, argc, argv);
  } catch (const CLI::RequiredError& error) {
    const std::string command = CheckCommand(*app_);
    if (command.empty()) return app_->exit(error);
    return app_->exit(CLI::ParseError(command, error.get_exit_code()));
  } catch (const CLI::ParseError& error) {
    return app_->exit(error);
  }
  return std::nullopt;
}

absl::Status FlagSet::ParseText(const std::string& text) {
  try {
    app_->parse(text);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return absl::OkStatus();
}

}  // namespace ringattn::client::cli
