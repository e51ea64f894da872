#include "client/cli/proto_json.h"

#include <string>

#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {

Json ProtoJson(const google::protobuf::Message& message, bool with_defaults) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = with_defaults;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  // A string that is not valid UTF-8, which a server must not send.
  if (!status.ok()) return Json::object();
  return Json::parse(text, nullptr, false);
}

}  // namespace ringattn::client::cli
