// CLI11's names for headers: its own takes five seconds to compile, and half of those who include a
// header of the command line never touch a flag. Who does includes "CLI/CLI.hpp".
#ifndef RINGATTN_CLIENT_CLI_CLI11_FWD_H_
#define RINGATTN_CLIENT_CLI_CLI11_FWD_H_

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

#endif  // RINGATTN_CLIENT_CLI_CLI11_FWD_H_
