// What forward and backward have in common: files in, one call, files out.
#ifndef RINGATTN_CLIENT_CLI_ATTENTION_COMMAND_H_
#define RINGATTN_CLIENT_CLI_ATTENTION_COMMAND_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/command.h"
#include "client/cli/flags.h"
#include "client/client.h"
#include "client/safetensors.h"

namespace ringattn::client::cli {

struct AttentionFlags {
  std::string server;
  std::string input;
  std::string output;
  OptionFlags options;
  std::string deadline;
  std::string request_id;
  int streams = 1;
  std::string trace;
  std::string progress_interval = "10s";
  bool json = false;

  void AddTo(CLI::App* command, const std::string& input_help, const std::string& output_help);
};

// Files opened and everything checked that can be without a server.
struct OpenedFiles {
  Problem problem;
  SafetensorsFile input;
  std::unique_ptr<SafetensorsWriter> output;
  int64_t tensor_bytes = 0;  // of the input
};

// Makes the call with arguments from the files.
using Attend =
    std::function<CallResult(Client& client, OpenedFiles& files, const CallOptions& options)>;

// The whole command; `outputs` are the tensors of the output file.
int RunAttention(const char* name, const AttentionFlags& flags,
                 const std::vector<v1::TensorId>& outputs, const Attend& attend);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_ATTENTION_COMMAND_H_
