// A program's arguments for CLI11, without flags that lack a value.
#ifndef RINGATTN_COMMON_PROCESS_COMMAND_ARGUMENTS_H_
#define RINGATTN_COMMON_PROCESS_COMMAND_ARGUMENTS_H_

namespace CLI {
class App;
}  // namespace CLI

namespace ringattn {

// Parses main's arguments. Throws CLI::ValidationError for an argument "--name=", and otherwise
// what CLI::App::parse throws. CLI11 alone would take the next argument as the value, so
// "--zone= --port=1" would set the zone to "--port=1". Arguments after "--" are positional.
void ParseArguments(CLI::App* app, int argc, const char* const* argv);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_COMMAND_ARGUMENTS_H_
