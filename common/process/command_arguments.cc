#include "common/process/command_arguments.h"

#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace ringattn {

void ParseArguments(CLI::App* app, int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--") break;
    if (absl::StartsWith(argument, "--") && argument.find('=') == argument.size() - 1) {
      throw CLI::ValidationError(std::string(argument),
                                 "has no value; give one, or omit the flag for its default");
    }
  }
  app->parse(argc, argv);
}

}  // namespace ringattn
