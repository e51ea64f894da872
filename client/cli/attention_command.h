// The common part of the commands forward and backward: read files, make one call, write a file.
// Tests: tests/e2e/test_cli.py.
#ifndef RINGATTN_CLIENT_CLI_ATTENTION_COMMAND_H_
#define RINGATTN_CLIENT_CLI_ATTENTION_COMMAND_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/client.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/flags.h"
#include "client/cli/region_stage.h"
#include "client/cli/server_flags.h"
#include "client/files/safetensors.h"

namespace ringattn::client::cli {

struct AttentionFlags {
  ServerFlags server;
  std::string input;
  std::string output;
  OptionFlags options;
  bool dlse = false;  // backward only
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  std::vector<v1::ProbabilityRow> probability_rows;  // forward only
  std::string deadline;
  std::string request_id;
  std::string traceparent;
  std::string retain;    // forward only; empty: nothing is kept
  std::string residual;  // backward only; empty: none
  bool keep_residual = false;
  std::string transport = "auto";
  CudaFlags cuda;
  int channels_per_worker = ClientOptions().channels_per_worker;
  int64_t staging_bytes = ClientOptions().staging_bytes;
  std::string trace;
  std::string progress_interval = "10s";
  bool json = false;

  void AddTo(FlagSet& command, const std::string& input_help, const std::string& output_help);
};

// Opened files, with everything checked that needs no server.
struct OpenedFiles {
  Problem problem;
  SafetensorsFile input;
  TensorMap<ConstBytes> option_tensors;  // of the input: tensors that only some requests have
  std::unique_ptr<SafetensorsWriter> output;
  std::vector<v1::TensorId> outputs;  // its tensors
  int64_t tensor_bytes = 0;           // of the input
};

// Makes the call with arguments from the files.
using Attend =
    std::function<CallResult(Client& client, OpenedFiles& files, const CallOptions& options)>;

// Runs the whole command and returns the exit code.
int RunAttention(const char* name, const AttentionFlags& flags, Direction direction,
                 const Attend& attend);

// Returns the memory in the output file of the results that only some requests have.
TensorMap<MutableBytes> OptionResults(const OpenedFiles& files);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_ATTENTION_COMMAND_H_
