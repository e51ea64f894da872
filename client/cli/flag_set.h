// FlagSet: the flags of one command. Hides CLI11, whose headers take seconds to compile, from all
// other files.
//
//   FlagSet& command = program.AddCommand("generate", "Write random inputs to a file");
//   command.Add("--seed", &seed, "Seed of the random numbers").NotNegative().ShowDefault();
//   command.OnChosen([&] { ... });
//
// Tests: flags_test.cc.
#ifndef RINGATTN_CLIENT_CLI_FLAG_SET_H_
#define RINGATTN_CLIENT_CLI_FLAG_SET_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace ringattn::client::cli {

// One flag of a FlagSet, which owns it. Each setter returns the same flag.
class Flag {
 public:
  explicit Flag(CLI::Option* option) : option_(option) {}

  // Lists the flag under this title in --help.
  Flag Group(const std::string& title) const;
  // Shows the variable's present value as the default in --help.
  Flag ShowDefault() const;
  // Shows this placeholder for the value in --help.
  Flag ValueName(const std::string& name) const;
  Flag Required() const;
  Flag Needs(const Flag& other) const;
  Flag Excludes(const Flag& other) const;
  // Splits the value into list elements at this character.
  Flag Delimiter(char delimiter) const;
  // The value may be omitted: "--flag" and "--flag=value" are both accepted.
  Flag OptionalValue() const;

  // Accepted values, both ends included for ranges.
  Flag OneOf(const std::vector<std::string>& values) const;
  Flag InRange(int min, int max) const;
  Flag InRange(double min, double max) const;
  Flag Positive() const;
  Flag NotNegative() const;
  // Accepts sizes such as 512MiB or 4GiB for a number of bytes.
  Flag AsSize() const;
  // Accepts durations such as 50ms or 2s for a number of milliseconds.
  Flag AsMilliseconds() const;

  // How often the parsed command line has the flag.
  size_t count() const;

 private:
  CLI::Option* option_;
};

// Not thread safe.
class FlagSet {
 public:
  // A program that expects exactly one of its commands.
  FlagSet(const std::string& name, const std::string& help, const std::string& version);
  // A set without commands, for tests.
  FlagSet();
  ~FlagSet();

  FlagSet(const FlagSet&) = delete;
  FlagSet& operator=(const FlagSet&) = delete;

  FlagSet& AddCommand(const std::string& name, const std::string& help);
  // This command expects exactly one of its own commands.
  void RequireCommand();
  // Called if the command line names this command.
  void OnChosen(std::function<void()> on_chosen);

  // Adds a flag that sets `*value`, which must outlive Parse. A bool is set by the flag alone. The
  // other types are string, int, int64_t, uint32_t, uint64_t, double, optional int, double,
  // uint32_t and uint64_t, and vectors of string and uint64_t. A double must be finite. A name
  // without dashes is positional.
  template <typename T>
  Flag Add(const std::string& names, T* value, const std::string& help);
  // Adds a flag whose value is passed to `set`. The status of `set` becomes the parse error.
  // The types are string, double, uint32_t and vector of string.
  template <typename T>
  Flag AddFunction(const std::string& name, std::function<absl::Status(const T&)> set,
                   const std::string& help);
  // Adds a flag without a value that calls `set`.
  Flag AddSwitch(const std::string& name, std::function<void()> set, const std::string& help);

  // Parses a program's command line. Returns nothing if it is valid, 0 after printing help or the
  // version, and another exit code after printing an error.
  std::optional<int> Parse(int argc, char** argv);
  // Parses flags separated by blanks. Errors: INVALID_ARGUMENT with CLI11's message.
  absl::Status ParseText(const std::string& text);

 private:
  explicit FlagSet(CLI::App* command);

  std::unique_ptr<CLI::App> owned_;  // of a program
  CLI::App* app_;
  std::vector<std::unique_ptr<FlagSet>> commands_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_FLAG_SET_H_
