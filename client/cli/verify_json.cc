#include "client/cli/verify_json.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

Json JudgedJson(const oracle::Judged& judged) {
  return {{"error", judged.error}, {"bound", judged.bound}};
}

}  // namespace

Json ReportJson(const oracle::Report& report) {
  Json tensors = Json::object();
  for (const oracle::TensorReport& tensor : report.tensors) {
    Json& json = tensors[TensorName(tensor.tensor)];
    json = {{"passed", tensor.passed},
            {"rows", tensor.rows},
            {"total_rows", tensor.total_rows},
            {"failed_elements", tensor.failed_elements},
            {"element", JudgedJson(tensor.element)}};
    if (tensor.suspects.has_value()) json["suspects"] = *tensor.suspects;
    if (tensor.tensor != TensorId::kLse) json["norm"] = JudgedJson(tensor.norm);
  }
  Json unjudged = Json::object();
  for (const oracle::Unjudged& missing : report.unjudged) {
    unjudged[TensorName(missing.tensor)] = missing.reason;
  }
  return {{"passed", report.passed()}, {"tensors", tensors}, {"unjudged", unjudged}};
}

}  // namespace ringattn::client::cli
